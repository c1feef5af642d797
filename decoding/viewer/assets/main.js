// The page as a whole: what is chosen, and who is told of it.
const sides = DATA.traces.map((trace, i) => new Side(trace, i));
const two = sides.length > 1;
document.body.className = two ? "two" : "one";
let active = sides[0];

const GATES = { ProbeGate: "probe", MatchLengthGate: "match", LengthGate: "cost", BanditGate: "bandit", Always: "always", Never: "never" };
const total = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function describe(side) {
  const about = side.trace.about;
  const mode = side.text.mode || about?.mode || "–";
  if (!about) return { mode };
  return { target: about.target, mode: `${mode}, ${about.lossless ? "lossless" : "not lossless"}`, gate: GATES[about.gate] ?? about.gate };
}

function tiles(side) {
  const s = side.text.summary;
  const said = describe(side);
  const about = side.trace.about;
  const many = side.trace.steps.particle !== null;
  const who = Object.keys(s.drafted);
  const all = [
    ["target", said.target, about ? [about.site && `probe at ${about.site}`, about.kappa && `κ ${about.kappa}`].filter(Boolean).join(", ") : "", "The language model whose text this is", "name"],
    ["mode", said.mode, said.gate ? `gate: ${said.gate}` : "", "What drafts, and whether the text is what the target would have written alone", "name"],
    ["tokens", String(s.written), `in ${counted(s.steps, "step")}${side.text.by[0] < 0 && side.text.known ? ", and 1 from prefill" : ""}`, "Tokens that the steps wrote; the first one comes with the prompt's forward"],
    ["tokens/s", number(s.tokens_per_second, 1), `${number(s.seconds, 2)} s in steps`, "Tokens that the steps wrote, over the time of the steps; the prompt's forward is none. A step that several requests share counts whole"],
    ["tokens per step", number(s.tokens_per_step, 2), many ? "of the chosen text" : "accepted length + 1", "Tokens that the steps wrote, over steps"],
    ["steps that copied", share(s.copied, s.rows), `${s.copied} of ${s.rows}`, "Steps in which the gate asked for a copy"],
    ["drafted tokens kept", share(total(s.kept), total(s.drafted)), who.map((name) => `${name} ${s.kept[name] ?? 0} of ${s.drafted[name]}`).join(", ") || "nothing drafted", "Of a tree, at most one path can be kept"],
    ["false copies", s.copied ? share(s.false_copies, s.copied) : "–", s.copied ? `${s.false_copies} of ${s.copied}` : "no copies", "Steps that copied and kept no drafted token"],
    ["ms per step", s.steps ? number(s.draft_ms + s.verify_ms + s.rest_ms, 1) : "–", s.steps ? `draft ${number(s.draft_ms, 1)}, verify ${number(s.verify_ms, 1)}, rest ${number(s.rest_ms, 1)}` : "", "Means. Draft: the drafters. Verify: the target's forward and the verifier. Rest: gate, masks, commit, text"],
    many && ["particles", String(new Set(side.rows.map((row) => side.get("particle", row))).size), "texts side by side", "One of them is chosen at the end; its steps are those marked in the text"],
    side.trace.steps.kept && ["against the target", String(s.against_target), "drafted tokens", "An arbiter kept the draft's token where the target would have written another"],
  ].filter((tile) => tile && tile[1] !== undefined);
  return make("div", "tiles", ...all.map(([name, value, remark, told, kind]) => {
    const made = make("dl", kind ?? "", make("dt", "", name), make("dd", "", value), make("dd", "", remark));
    made.title = told;
    return made;
  }));
}

// What the trace was made with, for those who want to know.
function settings() {
  const parts = sides.filter((side) => side.trace.about).map((side) => {
    const { settings: modes, sampling, site, label, kappa, tau } = side.trace.about;
    const told = Object.entries({ ...modes, ...sampling, site, label, kappa, tau }).filter(([, value]) => value !== null);
    const list = make("dl", "facts", ...told.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", String(value)))));
    return make("details", "", make("summary", "", two ? `Settings of ${side.letter}` : "Settings"), list);
  });
  by("settings").replaceChildren(...parts);
}

function legend() {
  const used = DATA.looks.filter((name) => sides.some((side) => side.trace.sources.includes(name)));
  const items = used.map((name) => make("li", "", make("span", `t ${marks(name)}`, "token"), ` ${WHO[name] ?? name}`));
  items.push(make("li", "", make("span", "t b", "token"), " a step begins"));
  items.push(make("li", "", make("span", "t r", "token"), " the target's own where drafts were rejected"));
  if (sides.some((side) => side.trace.sources.includes("copy"))) items.push(make("li", "", make("span", "t r f", "token"), " the same after a false copy"));
  if (sides.some((side) => side.trace.steps.kept)) items.push(make("li", "", make("span", "t a", "token"), " kept against the target"));
  by("legend").replaceChildren(...items);
}

// -- the parts --------------------------------------------------------------------------------------

const details = new Details(by("details"), (way) => step(way));
const panels = sides.map((side) => new TextPanel(side, (row) => choose(side, row, { text: false })));
by("sides").append(...panels.map((panel) => panel.root));
const curve = two ? new TwoCurve(by("chart")) : new IntentCurve(by("chart"), (row) => choose(sides[0], row, {}));
const table = new StepTable(by("steps"), (row) => choose(active, row, { table: true }));

// Chooses a step. `how`: where not to scroll, since it was chosen there.
function choose(side, row, how) {
  const changed = side !== active;
  active = side;
  side.row = row;
  const range = row >= 0 ? side.firsts.get(row) ?? null : null;
  panels[side.place].mark(row, range, how.text !== false);
  if (two) {
    const other = sides[1 - side.place];
    const at = range && side.text.known === other.text.known ? range[0] - side.text.prompt : -1;
    const there = other.text.by[at] ?? -1;
    other.row = there;
    panels[other.place].mark(there, there >= 0 ? other.firsts.get(there) : null, true);
    if (changed) pickSide(side);
  } else curve.point(row);
  table.mark(row, true);
  details.show(side, row);
  if (row >= 0) {
    const [kept, drafted] = [side.get("accepted", row).length, side.get("tokens", row).length];
    by("live").textContent = `Step ${side.get("step", row)}: ${side.trace.steps.reasons[side.get("reason", row)]}, kept ${kept} of ${drafted}`;
  }
}

function step(way) {
  const { rows } = active;
  if (!rows.length) return;
  const at = active.row < 0 ? (way > 0 ? -1 : rows.length) : active.at.get(active.row);
  choose(active, rows[Math.max(0, Math.min(rows.length - 1, at + way))], {});
}

function pickSide(side) {
  active = side;
  for (const press of document.querySelectorAll("[data-side]")) press.setAttribute("aria-pressed", String(Number(press.dataset.side) === side.place));
  table.show(side);
}

function note(text) {
  by("notes").append(make("p", "note", text));
}

function showText(index) {
  by("notes").replaceChildren();
  sides.forEach((side, i) => {
    side.show(index);
    panels[i].show();
    const letter = two ? `${side.letter}: ` : "";
    const held = side.trace.texts.length;
    if (held && index >= held) note(`${letter}There is no text ${index + 1}: the last one, ${held}, is shown.`);
    if (!side.rows.length) note(`${letter}No steps were recorded.`);
    else if (!side.text.known) note(`${letter}This trace holds no text: it was written by an earlier version, which kept the steps alone. Generate it again (switchsd generate --trace, or decoder.trace.save) to see the text.`);
  });
  if (two) {
    compareTexts();
    by("tiles").replaceChildren(beside(sides));
    curve.show(sides);
  } else {
    by("tiles").replaceChildren(tiles(sides[0]));
    curve.show(sides[0]);
  }
  active = sides[0];
  table.show(active);
  details.show(active, -1);
}

function compareTexts() {
  const [a, b] = sides;
  if (!a.text.pieces.length || !b.text.pieces.length) return;
  if (a.text.known !== b.text.known) return note("The texts are not compared: one of the traces holds none.");
  if (!samePrompt(a, b)) note("The prompts differ: the texts are compared token by token from where each answer begins.");
  const at = parting(a, b);
  const lengths = sides.map((side) => side.text.pieces.length - side.text.prompt);
  if (at < 0) by("notes").append(make("p", "", `Both answers are equal: ${counted(lengths[0], "token")}.`));
  else {
    const words = sides.map((side) => (at < lengths[side.place] ? `“${flat(side.text.pieces[side.text.prompt + at])}”` : "nothing more"));
    const press = button("Go there", () => panels.forEach((panel, i) => panel.scrollTo(Math.min(sides[i].text.prompt + at, sides[i].text.pieces.length - 1))));
    by("notes").append(make("p", "", at ? `The answers are equal for ${counted(at, "token")}; then A has ` : "The answers differ from the first token on: A has ", make("bdi", "", words[0]), " and B ", make("bdi", "", words[1]), ". ", press));
    if (at < Math.min(...lengths) && alike(a, b)) by("notes").append(make("p", "soft", "Both modes are lossless. In bfloat16 two tokens that are all but equally likely may change places; in float32 they do not."));
    sides.forEach((side, i) => panels[i].spans[side.text.prompt + at]?.classList.add("differs"));
  }
}

function help() {
  const keys = [
    ["← → or k j", "the step before, the next one"], ["Home End", "the first step, the last one"], ["Enter", "from the text or the table to the chosen step"],
    ["↑ ↓", "in the table: the rows as they are sorted"], ["/", "the filter"], ["Esc", "leave the filter, close this"], ["t", "dark, light, as the system has it"], ["?", "this"],
  ];
  const words = [
    ["pending token", "the token that is in the text and has no state yet: each step begins from it"],
    ["suffix match", "an earlier place where the last tokens, the pending one included, occur too"],
    ["candidate", "what follows there; a copy drafts it"],
    ["copy intent", "the probe's output at the anchor, the last position that has a state"],
    ["kept", "accepted by the target: these tokens stand in the text"],
    ["false copy", "a step that copied and kept nothing"],
  ];
  const list = (lines, key) => make("dl", "", ...lines.flatMap(([name, text]) => [make("dt", "", key ? make("kbd", "", name) : name), make("dd", "", text)]));
  const numbers = [...document.querySelectorAll(".tiles dl")].map((tile) => [tile.firstChild.textContent, tile.title]);
  const title = make("h2", "", "Keys");
  title.id = "help-title";
  by("help").replaceChildren(title, list(keys, true), make("h2", "", "Words"), list(words, false), ...(numbers.length ? [make("h2", "", "Numbers"), list(numbers, false)] : []), button("Close", () => by("help").close()));
}

// -- light and dark -----------------------------------------------------------------------------------

const KEPT = "switchsd-theme";

function remembered() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null; // a page in a page may keep nothing
  }
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  by("theme").textContent = { light: "Light", dark: "Dark" }[name] ?? "Theme: system";
  try {
    localStorage.setItem(KEPT, name);
  } catch {
    // as above
  }
  curve.later();
}

function turn() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const order = dark ? ["", "light", "dark"] : ["", "dark", "light"];
  theme(order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % 3]);
}

// -- keys ---------------------------------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || by("help").open) return;
  const typing = event.target.matches?.("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const acts = {
    ArrowLeft: () => step(-1), k: () => step(-1), ArrowRight: () => step(1), j: () => step(1),
    Home: () => active.rows.length && choose(active, active.rows[0], {}), End: () => active.rows.length && choose(active, active.rows.at(-1), {}),
    "/": () => table.box.focus(), "?": () => by("help").showModal(), t: turn,
  };
  const act = acts[event.key];
  if (!act || (event.shiftKey && event.key !== "?" && event.key !== "/")) return;
  event.preventDefault();
  act();
});

// -- begin --------------------------------------------------------------------------------------------

const names = sides.map((side) => side.trace.name);
by("title").append(two ? `A: ${names[0]}, B: ${names[1]}` : names[0], make("small", "", two ? " – two traces" : " – a trace, step by step"));
const choices = Math.max(...sides.map((side) => side.trace.texts.length));
if (choices > 1) {
  by("chooser").hidden = false;
  for (let i = 0; i < choices; i++) {
    const text = sides[0].trace.texts[i] ?? sides[1].trace.texts[i];
    const begins = !text.known ? "" : text.pieces.slice(text.prompt, text.prompt + 12).map(seen).join("").replace(/\s+/g, " ").trim().slice(0, 40);
    by("texts").append(new Option(`${i + 1} of ${choices}${begins ? `: ${begins}…` : ""}`, String(i)));
  }
  by("texts").addEventListener("change", (event) => showText(Number(event.target.value)));
}
if (two) {
  const switches = sides.map((side) => {
    const press = button(side.letter, () => pickSide(side), `Steps of ${side.letter}`);
    press.dataset.side = side.place;
    press.setAttribute("aria-pressed", String(side.place === 0));
    return press;
  });
  table.bar.prepend(...switches);
}
addEventListener("beforeprint", () => table.draw(true));
addEventListener("afterprint", table.later);
by("theme").addEventListener("click", turn);
by("ask").addEventListener("click", () => by("help").showModal());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", curve.later);
legend();
settings();
by("texts").value = String(Math.min(DATA.text, choices - 1));
showText(Math.max(0, Math.min(DATA.text, choices - 1)));
help();
theme(remembered() ?? "");
