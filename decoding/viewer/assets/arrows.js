// Arrows from a suffix match to its source, drawn over the part of the text that is in view. A source that is out of
// view is pointed at, with a button that goes there.
const MOST = 150;

class Arrows {
  constructor(panel) {
    this.panel = panel;
    this.all = false;
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("class", "arrows");
    this.svg.setAttribute("aria-hidden", "true");
    this.go = button("", () => panel.scrollTo(this.goal));
    this.go.className = "jump";
    this.go.hidden = true;
    panel.frame.append(this.svg, this.go);
    this.later = framed(() => this.draw());
    this.seen = new Set();
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) this.seen[entry.isIntersecting ? "add" : "delete"](entry.target);
      this.later();
    }, { root: panel.host });
    new ResizeObserver(this.later).observe(panel.host);
  }

  watch() {
    this.watcher.disconnect();
    this.seen.clear();
    for (const chunk of this.panel.chunks) this.watcher.observe(chunk.element);
  }

  draw() {
    const { panel } = this;
    const paths = [];
    this.go.hidden = true;
    const box = panel.host.getBoundingClientRect();
    const chosen = panel.side.row;
    if (this.all) {
      for (const row of this.rowsInView(box)) if (row !== chosen && paths.length < MOST) paths.push(...this.arrow(row, box, true));
    }
    if (chosen >= 0) paths.push(...this.arrow(chosen, box, false));
    this.svg.replaceChildren(...paths);
  }

  rowsInView(box) {
    const rows = new Set();
    for (const chunk of this.panel.chunks) {
      if (!this.seen.has(chunk.element)) continue;
      for (let i = chunk.from; i < chunk.to; i++) {
        const row = this.panel.writer(i);
        if (row < 0 || rows.has(row)) continue;
        const own = this.panel.spans[i].getBoundingClientRect();
        if (own.bottom > box.top && own.top < box.bottom) rows.add(row);
      }
    }
    return rows;
  }

  // Where a piece is, in the panel's own coordinates; only a direction where its chunk is out of view.
  place(at, box, end) {
    const chunk = this.panel.chunks.find((one) => at < one.to);
    if (!chunk) return null;
    if (!this.seen.has(chunk.element)) {
      const above = chunk.element.getBoundingClientRect().top < box.top;
      return { x: box.width / 2, y: above ? -9 : box.height + 9, away: above ? "up" : "down" };
    }
    const rects = this.panel.spans[at].getClientRects();
    const rect = rects[end ? rects.length - 1 : 0];
    if (!rect) return null;
    const x = (end ? rect.right : rect.left) - box.left;
    const [top, bottom] = [rect.top - box.top, rect.bottom - box.top];
    return { x, y: top, bottom, away: bottom < 0 ? "up" : top > box.height ? "down" : "" };
  }

  arrow(row, box, faint) {
    const match = this.panel.side.match(row);
    if (!match) return [];
    const from = this.place(match.own[1] - 1, box, true);
    const to = this.place(match.source[1] - 1, box, true);
    if (!from || !to) return [];
    if (!faint && to.away) {
      this.goal = match.source[0];
      this.go.textContent = `${to.away === "up" ? "↑" : "↓"} source at token ${match.source[0] + this.panel.side.text.start}`;
      this.go.className = `jump ${to.away}`;
      this.go.hidden = false;
    }
    if (from.away && to.away) return [];
    const clamp = (y) => Math.max(-12, Math.min(box.height + 12, y));
    const [x1, y1, x2, y2] = [from.x, clamp(from.y), to.x, clamp(to.y)];
    const lift = Math.min(70, 18 + Math.abs(x1 - x2) / 6 + Math.abs(y1 - y2) / 10);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M${x1.toFixed(1)} ${y1.toFixed(1)}C${x1.toFixed(1)} ${(y1 - lift).toFixed(1)} ${x2.toFixed(1)} ${(y2 - lift).toFixed(1)} ${x2.toFixed(1)} ${y2.toFixed(1)}`);
    if (faint) path.setAttribute("class", "faint");
    if (to.away) return [path];
    const head = document.createElementNS("http://www.w3.org/2000/svg", "path");
    head.setAttribute("d", `M${x2} ${y2 + 2}l-4 -8h8z`);
    head.setAttribute("class", faint ? "head faint" : "head");
    return [path, head];
  }
}
