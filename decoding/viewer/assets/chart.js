// Curves on a canvas: copy intent and accepted lengths over the text, or two traces over time.
const LINED = 400; // more points than this are not joined by a line
const LEFT = 38, RIGHT = 8, TOP = 14, BOTTOM = 18;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

class Curve {
  constructor(host, pick) {
    this.canvas = make("canvas", "");
    this.canvas.setAttribute("role", "img");
    this.now = make("div", "now");
    this.now.hidden = true;
    this.caption = make("p", "soft");
    this.root = make("div", "curve", this.canvas, this.now);
    host.append(this.caption, this.root);
    this.later = framed(() => this.draw());
    new ResizeObserver(this.later).observe(this.root);
    if (pick) {
      this.canvas.addEventListener("click", (event) => {
        const found = this.nearest(event.offsetX);
        if (found >= 0) pick(found);
      });
    } else this.canvas.style.cursor = "default";
  }

  begin() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const dense = window.devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(width * dense));
    this.canvas.height = Math.max(1, Math.round(height * dense));
    const pen = this.canvas.getContext("2d");
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    Object.assign(this, { pen, width, height });
  }

  label(text, x, y, align = "left") {
    this.pen.fillStyle = colour("--soft");
    this.pen.textAlign = align;
    this.pen.fillText(text, x, y);
  }

  rule(y, dashed, name = "--line") {
    this.pen.strokeStyle = colour(name);
    this.pen.lineWidth = 1;
    this.pen.setLineDash(dashed ? [5, 4] : []);
    this.pen.beginPath();
    this.pen.moveTo(LEFT, Math.round(y) + 0.5);
    this.pen.lineTo(this.width - RIGHT, Math.round(y) + 0.5);
    this.pen.stroke();
    this.pen.setLineDash([]);
  }

  ticks(low, high, unit) {
    const room = Math.max(2, Math.floor((this.width - LEFT) / 90));
    const rough = (high - low) / room || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
      const x = LEFT + ((at - low) / (high - low || 1)) * (this.width - LEFT - RIGHT);
      if (x < this.width - 60 || unit === "") this.label(String(+at.toFixed(6)), x, this.height - 8, "center");
    }
    if (unit) this.label(unit, this.width - RIGHT, this.height - 8, "right");
  }
}

// The chosen text: copy intent above, drafted and accepted lengths below.
class IntentCurve extends Curve {
  show(side) {
    this.side = side;
    const { rows } = side;
    const intents = rows.map((row) => side.intent(row));
    const numbers = intents.filter((value) => typeof value === "number");
    this.low = Math.min(0, ...bounds(numbers));
    this.high = Math.max(1, ...bounds(numbers));
    this.intents = intents;
    this.known = numbers.length > 0;
    const { tau } = side;
    this.tau = tau;
    this.caption.textContent = !rows.length ? "No steps." : this.known
      ? "Copy intent before each step (● copied, × copied and kept nothing, ○ not copied), and below it the accepted length."
      : "Accepted length of each step. No probe was read.";
    this.canvas.setAttribute("aria-label", `${this.known ? `copy intent of ${rows.length} steps${tau === null ? "" : `, threshold ${tau}`}; ` : ""}accepted length of ${rows.length} steps`);
    this.root.hidden = !rows.length;
    this.later();
  }

  x(row) {
    const { rows } = this.side;
    const [first, last] = [this.side.get("position", rows[0]), this.last];
    return LEFT + 6 + ((this.side.get("position", row) - first) / (last - first || 1)) * (this.width - LEFT - RIGHT - 12);
  }

  draw() {
    if (!this.side || this.root.hidden) return;
    this.begin();
    const { side, pen, height } = this;
    const { rows } = side;
    this.last = rows.reduce((most, row) => Math.max(most, side.get("position", row)), 0);
    const split = this.known ? height * 0.6 : TOP;
    const y = (value) => TOP + (1 - (value - this.low) / (this.high - this.low)) * (split - TOP - 8);
    if (this.known) {
      for (const value of [this.low, this.high]) {
        this.rule(y(value));
        this.label(String(+value.toFixed(2)), LEFT - 5, y(value), "right");
      }
      if (this.tau !== null) {
        this.rule(y(this.tau), true, "--bad");
        this.label(`τ ${+this.tau.toFixed(2)}`, LEFT - 5, Math.min(Math.max(y(this.tau), y(this.high) + 13), y(this.low) - 13), "right");
      }
      pen.strokeStyle = colour("--soft");
      pen.globalAlpha = 0.5;
      pen.beginPath();
      let down = false;
      if (rows.length <= LINED) rows.forEach((row, i) => {
        if (typeof this.intents[i] !== "number") return;
        pen[down ? "lineTo" : "moveTo"](this.x(row), y(this.intents[i]));
        down = true;
      });
      pen.stroke();
      pen.globalAlpha = 1;
      const [copy, bad, plain] = [colour(`--s${look("copy")}`) || colour("--good"), colour("--bad"), colour("--soft")];
      const size = rows.length > 1500 ? 1.5 : rows.length > 300 ? 2.5 : 3.5;
      rows.forEach((row, i) => {
        if (typeof this.intents[i] !== "number") return;
        const [px, py] = [this.x(row), y(this.intents[i])];
        pen.beginPath();
        if (side.falseCopy(row)) {
          pen.strokeStyle = bad;
          pen.lineWidth = 1.5;
          pen.moveTo(px - size, py - size);
          pen.lineTo(px + size, py + size);
          pen.moveTo(px + size, py - size);
          pen.lineTo(px - size, py + size);
          pen.stroke();
        } else {
          pen.arc(px, py, size, 0, 7);
          if (side.copied(row)) {
            pen.fillStyle = copy;
            pen.fill();
          } else {
            pen.strokeStyle = plain;
            pen.lineWidth = 1;
            pen.stroke();
          }
        }
      });
    }
    const most = rows.reduce((m, row) => Math.max(m, side.get("accepted", row).length), 1);
    const base = height - BOTTOM - 2;
    const top = split + (this.known ? 8 : 0);
    const wide = Math.max(1, Math.min(8, (this.width - LEFT - RIGHT) / rows.length - 1));
    const inks = side.trace.sources.map((name) => colour(`--s${look(name)}`));
    this.label(String(most), LEFT - 5, top + 2, "right");
    this.label("0", LEFT - 5, base - 2, "right");
    for (const row of rows) {
      const accepted = side.get("accepted", row);
      if (!accepted.length) continue;
      const tall = (accepted.length / most) * (base - top);
      pen.fillStyle = inks[side.trace.sources.indexOf(side.source(row, accepted[0]))];
      pen.fillRect(this.x(row) - wide / 2, base - tall, wide, tall);
    }
    this.rule(base);
    this.ticks(side.get("position", rows[0]), this.last, "position");
    this.point(side.row);
  }

  point(row) {
    this.now.hidden = row < 0 || !this.width;
    if (!this.now.hidden) this.now.style.left = `${this.x(row) - 1}px`;
  }

  nearest(x) {
    let [best, far] = [-1, Infinity];
    for (const row of this.side.rows) {
      const d = Math.abs(this.x(row) - x);
      if (d < far) [best, far] = [row, d];
    }
    return best;
  }
}

function bounds(values) {
  return values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [];
}
