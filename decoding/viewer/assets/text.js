// The text of one side: a mark on each token for who drafted it, a bar where a step begins.
const CHUNK = 200; // tokens, then the next line break ends a chunk
const LONGEST = 600;

class TextPanel {
  constructor(side, choose) {
    this.side = side;
    this.marked = [];
    this.told = make("span", "");
    this.all = button("All arrows", () => this.toggle(), "An arrow from each suffix match to its source");
    this.all.setAttribute("aria-pressed", "false");
    this.host = make("div", "text");
    this.host.tabIndex = 0;
    this.host.setAttribute("role", "region");
    this.frame = make("div", "view", this.host);
    this.root = make("div", "panel", make("div", "bar", this.told, this.all), this.frame);
    this.arrows = new Arrows(this);
    this.host.addEventListener("scroll", this.arrows.later);
    this.host.addEventListener("click", (event) => {
      const at = this.pieceAt(event.target);
      if (at !== null && this.writer(at) >= 0) choose(this.writer(at));
    });
    this.host.addEventListener("pointerover", (event) => {
      const at = event.pointerType === "mouse" ? this.pieceAt(event.target) : null;
      if (at === null) TIP.hide();
      else TIP.show(event.target, this.hint(at));
    });
    this.host.addEventListener("pointerleave", () => TIP.hide());
    this.host.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      if (this.side.row < 0 && this.side.rows.length) choose(this.firstInView());
      by("details").focus();
    });
    this.show();
  }

  pieceAt(element) {
    return element.dataset?.i === undefined ? null : Number(element.dataset.i);
  }

  writer(at) {
    const { prompt, by: writers } = this.side.text;
    return at < prompt ? -1 : writers[at - prompt];
  }

  firstInView() {
    const top = this.host.getBoundingClientRect().top;
    const found = this.spans.findIndex((span, i) => this.writer(i) >= 0 && span.getBoundingClientRect().bottom > top);
    return found < 0 ? this.side.rows[0] : this.writer(found);
  }

  show() {
    const { text, trace } = this.side;
    const { prompt, pieces, source, by: writers, node } = text;
    this.spans = [];
    this.chunks = [];
    this.marked = [];
    let chunk = null;
    const parts = document.createDocumentFragment();
    pieces.forEach((piece, i) => {
      const span = document.createElement("span");
      span.dataset.i = i;
      let name = "t";
      if (i < prompt) name += " p";
      else {
        const row = writers[i - prompt];
        if (row >= 0) {
          name += " w";
          if (i === prompt || writers[i - prompt - 1] !== row) name += " b";
          if (node[i - prompt] < 0 && this.side.rejected(row)) name += this.side.falseCopy(row) ? " r f" : " r";
          if (node[i - prompt] >= 0 && this.side.get("kept", row)?.includes(node[i - prompt])) name += " a";
        }
        name += ` ${marks(trace.sources[source[i - prompt]])}`;
      }
      if (piece === "") name += " mt";
      else if (piece.includes("\n")) name += " nl";
      span.className = name;
      span.textContent = text.known ? seen(piece) : `${piece} `;
      if (chunk === null) {
        chunk = make("div", "chunk");
        this.chunks.push({ element: chunk, from: i, to: i });
        parts.append(chunk);
      }
      chunk.append(span);
      this.spans.push(span);
      const open = this.chunks.at(-1);
      open.to = i + 1;
      const size = open.to - open.from;
      if ((size >= CHUNK && piece.endsWith("\n")) || size >= LONGEST) chunk = null;
    });
    this.host.replaceChildren(parts);
    this.host.scrollTop = 0;
    this.root.classList.toggle("short", pieces.length < 400);
    const generated = pieces.length - prompt;
    const known = text.known ? `${counted(prompt, "prompt token")}, ${generated} generated` : `${counted(generated, "token")} by their ids`;
    const label = `${DATA.traces.length > 1 ? `${this.side.letter}: ` : ""}${text.mode || "text"}, ${known}`;
    this.told.textContent = pieces.length ? label : `${text.mode}: the text was not kept`;
    this.host.setAttribute("aria-label", label);
    this.root.hidden = pieces.length === 0;
    this.arrows.watch();
  }

  // Marks a step's tokens, its suffix match and where that came from; scrolls there if asked to.
  mark(row, range, scroll) {
    for (const [span, name] of this.marked) span.classList.remove(name);
    this.marked = [];
    const put = (name, [from, to]) => {
      for (let i = Math.max(from, 0); i < Math.min(to, this.spans.length); i++) {
        this.spans[i].classList.add(name);
        this.marked.push([this.spans[i], name]);
      }
    };
    const match = row >= 0 ? this.side.match(row) : null;
    if (match) {
      put("cand", match.candidate);
      put("src", match.source);
      put("src", match.own);
    }
    if (range) put("on", range);
    if (range && scroll) this.scrollTo(range[0]);
    this.arrows.later();
  }

  scrollTo(at) {
    const span = this.spans[at];
    if (!span) return;
    const bring = () => {
      const [own, box] = [span.getBoundingClientRect(), this.host.getBoundingClientRect()];
      if (own.top < box.top + 20 || own.bottom > box.bottom - 20) this.host.scrollTop += own.top - box.top - box.height * 0.4;
    };
    bring();
    requestAnimationFrame(bring); // chunks that came into view may have turned out longer or shorter than reckoned
  }

  toggle() {
    this.arrows.all = !this.arrows.all;
    this.all.setAttribute("aria-pressed", String(this.arrows.all));
    this.arrows.later();
  }

  hint(at) {
    const { text, trace } = this.side;
    const row = this.writer(at);
    const where = `token ${text.start + at}`;
    if (at < text.prompt) return [`prompt, ${where}`];
    if (row < 0) return [`${where}: ${text.by.length && at === text.prompt ? "the target's own, from the prompt's forward" : "no step of this trace wrote it"}`];
    const accepted = this.side.get("accepted", row);
    const node = text.node[at - text.prompt];
    const who = trace.sources[text.source[at - text.prompt]];
    const lines = [`${where}: ${WHO[who] ?? who}; step ${this.side.get("step", row)}, kept ${accepted.length} of ${counted(this.side.get("tokens", row).length, "drafted token")}`];
    if (node >= 0 && this.side.get("kept", row)?.includes(node)) lines.push("kept against the target");
    const words = (nodes) => nodes.map((n) => flat(this.side.string(this.side.get("tokens", row)[n])));
    if (accepted.length) lines.push(["✓ accepted: ", words(accepted).join(" "), "good"]);
    const kept = new Set(accepted);
    const others = this.side.get("tokens", row).map((_, n) => n).filter((n) => !kept.has(n));
    if (others.length) lines.push(["✗ rejected: ", words(others.slice(0, 12)).join(" ") + (others.length > 12 ? ` and ${others.length - 12} more` : ""), "bad"]);
    return lines;
  }
}

const TIP = {
  show(element, lines) {
    const tip = by("tip");
    tip.replaceChildren(...lines.map((line) => (typeof line === "string" ? make("p", "", line) : make("p", "", make("span", line[2], line[0]), make("bdi", "", line[1])))));
    tip.hidden = false;
    const [own, box] = [element.getClientRects()[0] ?? element.getBoundingClientRect(), tip.getBoundingClientRect()];
    tip.style.left = `${Math.max(8, Math.min(own.left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${own.bottom + box.height + 10 < innerHeight ? own.bottom + 6 : Math.max(4, own.top - box.height - 6)}px`;
  },
  hide() {
    by("tip").hidden = true;
  },
};
