// The chosen step in full.
const REASONS = {
  intent: "a suffix match, and copy intent reaches τ",
  "no intent": "a suffix match, but copy intent stays below τ",
  match: "a suffix match is long enough",
  "no match": "no suffix match is long enough",
  never: "this gate never asks a drafter",
  always: "this gate asks at every step",
  bandit: "whichever drafter has paid so far",
  "no room": "the text is as long as it may be",
  "no draft is worth its time": "more tokens per millisecond are expected without a draft",
};
const ASKED = { copy: "for a copy", eagle: "the EAGLE head", draft: "the draft model" };
const AROUND = 6; // tokens shown on each side of the source
const NODES = 80; // drafted tokens listed at first

class Details {
  constructor(root, move) {
    this.root = root;
    this.move = move;
  }

  show(side, row) {
    if (row < 0) {
      this.root.replaceChildren(make("h2", "", "No step chosen"), make("p", "soft", side.rows.length ? "Choose a token, a step or a point of the curve; the keys ← and → go from step to step." : "This text has no steps."));
      return;
    }
    const get = (name) => side.get(name, row);
    const accepted = get("accepted");
    const drafted = get("tokens").length;
    const letter = DATA.traces.length > 1 ? `${side.letter}, ` : "";
    const of = get("particle") === null ? "" : ` of particle ${get("particle")}`;
    const [back, on] = [button("‹", () => this.move(-1), "The step before (←)"), button("›", () => this.move(1), "The next step (→)")];
    back.setAttribute("aria-label", "The step before");
    on.setAttribute("aria-label", "The next step");
    const at = side.at.get(row);
    back.disabled = at === 0;
    on.disabled = at === side.rows.length - 1;
    const reason = side.trace.steps.reasons[get("reason")];
    const who = side.drafters(row).map((name) => ASKED[name] ?? name).join(" and ");
    const says = REASONS[reason] ? ` (${REASONS[reason]})` : "";
    const came = drafted ? `${accepted.length} of ${counted(drafted, "drafted token")} kept` : "nothing drafted";
    const head = make("div", "top", make("h2", "", `${letter}step ${get("step")}${of}: ${came}`), make("span", "", back, " ", on));
    const parts = [head, make("p", "", make("strong", "", reason), `${says}: ${who ? `asked ${who}` : "asked no drafter"}.`)];
    if (side.falseCopy(row)) parts.push(make("p", "bad", "A false copy: copied, and nothing of it was kept."));
    if (side.text.pieces.length && !side.firsts.has(row)) parts.push(make("p", "soft", "What this step wrote does not stand in the text that was chosen."));
    const cut = side.cut(row);
    if (cut) parts.push(make("p", "soft", `The text ends in this step: ${counted(cut, "token")} behind its end ${cut === 1 ? "was" : "were"} cut.`));
    parts.push(this.facts(side, row), ...this.source(side, row));
    if (drafted) parts.push(make("h2", "", "Drafted"), this.tree(side, row));
    parts.push(make("p", "", "The target's own after it: ", make(cut ? "s" : "span", "", make("bdi", "words", flat(side.string(get("pending"))))), cut ? " (cut)" : ""));
    this.root.replaceChildren(...parts);
  }

  facts(side, row) {
    const get = (name) => side.get(name, row);
    const tau = side.trace.about?.tau ?? null;
    const facts = [
      ["copy intent", get("intent") === null ? null : number(get("intent"), 3) + (tau === null ? "" : ` (τ ${number(tau, 3)})`)],
      ["suffix match", get("match_length") ? `${counted(get("match_length"), "token")}, candidate at ${get("match_start")}` : "none"],
      ["pending token at", get("position")],
      ["draft", `${number(get("draft_ms"), 2)} ms`],
      ["verify", `${number(get("verify_ms"), 2)} ms`],
      ["rest", `${number(get("rest_ms"), 2)} ms`],
      ["began after", `${number(get("start"), 3)} s`],
      ["rows in the forward", get("rows") > 1 ? get("rows") : null],
      ["log weight", get("log_weight") === null ? null : number(get("log_weight"), 3)],
      ["ESS", get("ess") === null ? null : number(get("ess"), 2)],
      ["asked the arbiter", get("asked") ? counted(get("asked"), "time") : null],
      ["kept against the target", get("kept")?.length ? counted(get("kept").length, "token") : null],
    ];
    return make("dl", "facts", ...facts.filter(([, value]) => value !== null).map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", String(value)))));
  }

  // What the last tokens repeat, in its surroundings, and what followed there.
  source(side, row) {
    if (!side.get("match_length", row)) return [];
    const match = side.match(row);
    if (!match) return [make("p", "soft", side.text.known ? "The source of the suffix match is not in this text." : "The source of the suffix match is not shown: the text was not kept.")];
    const { pieces } = side.text;
    const cut = (from, to) => pieces.slice(Math.max(from, 0), to).map(seen).join("").replaceAll("\n", "↵\n");
    const [a, b] = match.source;
    const [c, d] = match.candidate;
    const words = make("div", "words", make("span", "soft", (a > AROUND ? "…" : "") + cut(a - AROUND, a)), make("span", "src", cut(a, b)), make("span", "cand", cut(c, d)), make("span", "soft", `${cut(d, d + AROUND)}…`));
    return [make("h2", "", "Source"), make("p", "soft", "The suffix match, and the candidate that follows it:"), words];
  }

  tree(side, row) {
    const [tokens, parents, logq] = [side.get("tokens", row), side.parents(row), side.get("logq", row)];
    const accepted = new Set(side.get("accepted", row));
    const against = new Set(side.get("kept", row) ?? []);
    const ends = accepted.size + 1 - side.cut(row); // accepted tokens from here on were cut
    const children = new Map();
    const depths = [];
    parents.forEach((parent, i) => {
      depths.push(parent < 0 ? 1 : depths[parent] + 1);
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(i);
    });
    for (const list of children.values()) list.sort((a, b) => accepted.has(b) - accepted.has(a) || a - b);
    const lines = [];
    const stack = (children.get(-1) ?? []).map((node) => [node, 0]).reverse();
    while (stack.length) {
      const [node, level] = stack.pop();
      const kept = accepted.has(node);
      const name = side.source(row, node);
      const cut = kept && depths[node] > ends;
      const more = [WHO[name] ?? name];
      if (logq) more.push(`log q ${number(logq[node], 2)}`);
      if (against.has(node)) more.push("kept against the target");
      if (cut) more.push("cut: behind the text's end");
      const token = make("bdi", `words t ${marks(name)}`, cut ? make("s", "", flat(side.string(tokens[node]))) : flat(side.string(tokens[node])));
      const line = make("li", kept ? "yes" : "no", make("span", "depth", String(depths[node])), make("span", kept ? "mark good" : "mark bad", kept ? "✓" : "✗"), token, make("span", "more", more.join(", ")));
      line.style.paddingLeft = `${Math.min(level, 12) * 0.9}em`;
      line.setAttribute("aria-label", `${kept ? "accepted" : "rejected"}: ${flat(side.string(tokens[node]))}, ${more.join(", ")}, depth ${depths[node]}`);
      lines.push(line);
      const own = children.get(node) ?? [];
      const deeper = own.length > 1 ? level + 1 : level;
      for (const child of [...own].reverse()) stack.push([child, deeper]);
    }
    const list = make("ol", "tree", ...lines.slice(0, NODES));
    list.setAttribute("aria-label", "Drafted tokens");
    if (lines.length > NODES) {
      const rest = make("li", "", button(`and ${lines.length - NODES} more`, () => rest.replaceWith(...lines.slice(NODES))));
      list.append(rest);
    }
    return list;
  }
}
