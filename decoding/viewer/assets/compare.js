// Two traces: where their texts part, and how fast each came.
const WINDOW = 16; // steps of a running mean

// Index of the first generated token that differs; -1 where the texts are equal.
function parting(first, second) {
  const [a, b] = [first, second].map(({ text }) => text.pieces.slice(text.prompt));
  for (let g = 0; g < Math.max(a.length, b.length); g++) if (a[g] !== b[g]) return g;
  return -1;
}

function samePrompt(first, second) {
  const [a, b] = [first, second].map(({ text }) => text.pieces.slice(0, text.prompt));
  return a.length === b.length && a.every((piece, i) => piece === b[i]);
}

// Traces that should hold the same text: of the same target, prompt and sampling, in lossless modes.
function alike(first, second) {
  const [a, b] = [first, second].map(({ trace }) => trace.about);
  return Boolean(a?.lossless && b?.lossless) && a.target === b.target && JSON.stringify(a.sampling) === JSON.stringify(b.sampling) && samePrompt(first, second);
}

class TwoCurve extends Curve {
  show(sides) {
    this.sides = sides;
    this.lines = sides.map((side) => {
      const rows = side.rows.filter((row) => side.trace.steps.particle === null || side.firsts.has(row));
      const first = rows.length ? side.get("start", rows[0]) : 0;
      let tokens = 0;
      const kept = [];
      return rows.map((row) => {
        const wrote = side.get("accepted", row).length + 1;
        tokens += wrote;
        kept.push(wrote);
        const last = kept.slice(-WINDOW);
        return { seconds: side.get("start", row) - first + side.seconds(row), tokens, mean: last.reduce((a, b) => a + b) / last.length };
      });
    });
    this.caption.textContent = `Above: tokens over seconds. Below: tokens per step, mean of ${WINDOW} steps, over tokens. A is the full line, B the dashed one.`;
    this.canvas.setAttribute("aria-label", sides.map((side, i) => {
      const end = this.lines[i].at(-1);
      return `${side.letter}: ${end ? `${end.tokens} tokens in ${end.seconds.toFixed(2)} seconds` : "no steps"}`;
    }).join("; "));
    this.canvas.style.height = "250px";
    this.later();
  }

  draw() {
    if (!this.lines) return;
    this.begin();
    const half = this.height / 2;
    const end = (name) => Math.max(1e-9, ...this.lines.map((line) => line.reduce((m, point) => Math.max(m, point[name]), 0)));
    const band = (top, bottom, across, up, name, unit) => {
      const [wide, tall] = [end(across), end(up)];
      this.rule(bottom);
      this.label(String(+tall.toFixed(1)), LEFT - 5, top + 4, "right");
      this.label("0", LEFT - 5, bottom - 3, "right");
      this.label(name, this.width - RIGHT, top - 6, "right");
      this.lines.forEach((line, i) => {
        this.pen.strokeStyle = i ? colour("--bad") : colour("--link");
        this.pen.lineWidth = 2;
        this.pen.setLineDash(i ? [6, 4] : []);
        this.pen.beginPath();
        this.pen.moveTo(LEFT, bottom);
        line.forEach((point, n) => {
          const [x, y] = [LEFT + (point[across] / wide) * (this.width - LEFT - RIGHT), bottom - (point[up] / tall) * (bottom - top)];
          if (n === 0 && up === "mean") this.pen.moveTo(x, y);
          else this.pen.lineTo(x, y);
        });
        this.pen.stroke();
        this.pen.setLineDash([]);
      });
      const keep = this.height;
      this.height = bottom + BOTTOM;
      this.ticks(0, wide, unit);
      this.height = keep;
    };
    band(TOP, half - BOTTOM, "seconds", "tokens", "tokens", "seconds");
    band(half + TOP, this.height - BOTTOM, "tokens", "mean", "tokens per step", "tokens");
  }
}

function beside(sides) {
  const [a, b] = sides.map((side) => side.text.summary);
  const rate = (s, part, whole) => (s[whole] ? s[part] / s[whole] : null);
  const lines = [
    ["tokens", (s) => s.written, 0],
    ["tokens/s", (s) => s.tokens_per_second, 1],
    ["tokens per step", (s) => s.tokens_per_step, 2],
    ["steps", (s) => s.steps, 0],
    ["steps that copied", (s) => rate(s, "copied", "rows"), "%"],
    ["false copies", (s) => s.false_copies, 0],
    ["drafted tokens kept", (s) => (total(s.drafted) ? total(s.kept) / total(s.drafted) : null), "%"],
    ["draft ms", (s) => s.draft_ms, 2],
    ["verify ms", (s) => s.verify_ms, 2],
    ["rest ms", (s) => s.rest_ms, 2],
  ];
  const shown = (value, digits) => (value === null || value === undefined ? "–" : digits === "%" ? `${(100 * value).toFixed(0)} %` : value.toFixed(digits));
  const row = (cells) => {
    const made = make("tr", "", ...cells.map((text, i) => make(i ? "td" : "th", "", text)));
    made.firstChild.scope = "row";
    return made;
  };
  const head = make("tr", "", ...["", "A", "B", "B / A"].map((text) => make("th", "", text)));
  const named = ["trace", "target", "mode", "gate"].map((name) => row([name, ...sides.map((side) => (name === "trace" ? side.trace.name : describe(side)[name] ?? "–")), ""]));
  return make("table", "beside", make("thead", "", head), make("tbody", "", ...named, ...lines.map(([name, value, digits]) => {
    const [x, y] = [value(a), value(b)];
    return row([name, shown(x, digits), shown(y, digits), x && typeof y === "number" ? `${(y / x).toFixed(2)}×` : "–"]);
  })));
}
