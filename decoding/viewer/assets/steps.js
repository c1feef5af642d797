// The table of steps: it sorts, filters, and holds only the rows that are in view.
const TALL = 28;
const BETWEEN = "\u2009·\u2009"; // tokens in a cell

class StepTable {
  constructor(host, choose) {
    this.choose = choose;
    this.sort = { key: "step", down: false };
    this.wanted = new Set();
    this.title = make("h2", "");
    this.box = make("input", "");
    this.box.type = "search";
    this.box.placeholder = "Filter: reason, drafter, token";
    this.box.setAttribute("aria-label", "Filter the steps by reason, drafter or token");
    this.count = make("span", "soft");
    this.count.setAttribute("role", "status");
    this.quick = make("span", "filters");
    this.bar = make("div", "filters", this.box, this.quick, this.count);
    this.heads = make("div", "line heads");
    this.heads.setAttribute("role", "row");
    this.body = make("div", "rows");
    this.body.setAttribute("role", "rowgroup");
    this.grid = make("div", "grid", this.heads, this.body);
    this.grid.tabIndex = 0;
    this.grid.setAttribute("role", "grid");
    this.grid.setAttribute("aria-label", "Steps");
    host.append(this.title, this.bar, this.grid);
    this.later = framed(() => this.draw());
    this.grid.addEventListener("scroll", this.later);
    new ResizeObserver(this.later).observe(this.grid);
    let waiting = 0;
    this.box.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.refresh(), 60);
    });
    this.body.addEventListener("click", (event) => {
      const line = event.target.closest(".line");
      if (line) choose(Number(line.dataset.row));
    });
    this.grid.addEventListener("keydown", (event) => {
      const way = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12 }[event.key];
      if (event.key === "Enter" && event.target === this.grid) return by("details").focus();
      if (!way) return;
      event.preventDefault();
      const at = this.shown.indexOf(this.side.row);
      const to = Math.max(0, Math.min(this.shown.length - 1, at < 0 ? 0 : at + way));
      if (this.shown.length) choose(this.shown[to]);
    });
  }

  show(side) {
    this.side = side;
    this.found = new Map();
    const has = (name) => side.trace.steps[name] !== null && side.rows.some((row) => side.get(name, row) !== null && side.get(name, row) !== 0 && side.get(name, row).length !== 0);
    const many = side.trace.steps.particle !== null;
    const names = (row) => side.drafters(row).join(" + ") || "none";
    const words = (row) => side.written(row).map((id) => flat(side.string(id))).join(BETWEEN);
    const plain = (name, digits) => (row) => number(side.get(name, row), digits);
    const columns = [
      ["step", "step", 72, (row) => side.get("step", row), null, "The steps of the request, from 0"],
      many && ["particle", "particle", 90, (row) => side.get("particle", row), null, "Which of the request's particles"],
      ["drafters", "drafters", 100, names, names, "Who was asked to draft"],
      ["drafted", "drafted", 86, (row) => side.get("tokens", row).length, null, "Drafted tokens"],
      ["kept", "kept", 66, (row) => side.get("accepted", row).length, null, "Accepted length"],
      side.trace.steps.kept && ["against", "against target", 126, (row) => side.get("kept", row).length, null, "Drafted tokens that an arbiter kept against the target"],
      ["written", "written", 260, words, words, "The accepted tokens, and the target's own after them"],
      ["reason", "reason", 200, (row) => side.trace.steps.reasons[side.get("reason", row)], null, "Why, in the gate's words"],
      has("intent") && ["intent", "intent", 80, (row) => side.intent(row), plain("intent", 3), "Copy intent: the probe's output at the anchor"],
      ["match", "match", 80, (row) => side.get("match_length", row), null, "Length of the longest suffix match; 0 = none"],
      ["position", "position", 88, (row) => side.get("position", row), null, "Index of the pending token that the step began from"],
      ["draft", "draft ms", 90, (row) => side.get("draft_ms", row), plain("draft_ms", 2), "Milliseconds of the drafters, for all requests in the step"],
      ["verify", "verify ms", 94, (row) => side.get("verify_ms", row), plain("verify_ms", 2), "Milliseconds of the target's forward and the verifier"],
      ["rest", "rest ms", 84, (row) => side.get("rest_ms", row), plain("rest_ms", 2), "Gate, masks, commit, text"],
      has("log_weight") && ["weight", "log weight", 104, (row) => side.get("log_weight", row), plain("log_weight", 2), "The particle's, before any resampling"],
      has("ess") && ["ess", "ESS", 70, (row) => side.get("ess", row), plain("ess", 2), "Effective sample size of the particles, before any resampling"],
    ].filter(Boolean);
    this.columns = columns.map(([key, name, width, value, cell, told]) => ({ key, name, width, value, cell: cell ?? ((row) => String(value(row))), told, left: ["drafters", "reason", "written"].includes(key) }));
    if (!this.columns.some((column) => column.key === this.sort.key)) this.sort = { key: "step", down: false };
    this.heads.replaceChildren(...this.columns.map((column) => {
      const press = button(column.name, () => this.order(column.key), column.told);
      const cell = make("div", column.left ? "left" : "", press);
      cell.setAttribute("role", "columnheader");
      cell.dataset.key = column.key;
      return cell;
    }));
    const widths = this.columns.map(({ width, key }) => (key === "written" ? `minmax(${width}px, 1fr)` : `${width}px`));
    this.grid.style.setProperty("--columns", widths.join(" "));
    this.grid.style.setProperty("--width", `${this.columns.reduce((sum, column) => sum + column.width, 0)}px`);
    const quick = [
      ["copied", (row) => side.copied(row), "copying was asked for"],
      ["false copy", (row) => side.falseCopy(row), "copied, and kept nothing"],
      ["rejected something", (row) => side.rejected(row), "a drafted token was not kept"],
      ["abstained", (row) => side.drafters(row).length === 0, "nobody was asked to draft"],
      side.trace.steps.kept && ["against the target", (row) => side.get("kept", row).length > 0, "an arbiter kept a drafted token that the target would not have written"],
    ].filter(Boolean);
    this.tests = new Map(quick.map(([name, test]) => [name, test]));
    this.wanted = new Set([...this.wanted].filter((name) => this.tests.has(name)));
    this.quick.replaceChildren(...quick.map(([name, , told]) => {
      const press = button(name, () => {
        this.wanted[this.wanted.has(name) ? "delete" : "add"](name);
        press.setAttribute("aria-pressed", String(this.wanted.has(name)));
        this.refresh();
      }, told);
      press.setAttribute("aria-pressed", String(this.wanted.has(name)));
      return press;
    }));
    this.title.textContent = `Steps${DATA.traces.length > 1 ? ` of ${side.letter}` : ""}`;
    this.refresh();
  }

  order(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : false };
    this.refresh();
  }

  // All that the filter looks through, in small letters.
  words(row) {
    let text = this.found.get(row);
    if (text === undefined) {
      const { side } = this;
      const ids = [...side.get("tokens", row), side.get("pending", row)];
      text = [this.side.trace.steps.reasons[side.get("reason", row)], side.drafters(row).join(" + ") || "none", ids.map((id) => side.string(id)).join("\n"),
        side.written(row).map((id) => side.string(id)).join("")].join("\n").toLowerCase();
      this.found.set(row, text);
    }
    return text;
  }

  refresh() {
    const wanted = this.box.value.toLowerCase();
    const tests = [...this.wanted].map((name) => this.tests.get(name));
    this.shown = this.side.rows.filter((row) => tests.every((test) => test(row)) && (!wanted || this.words(row).includes(wanted)));
    const column = this.columns.find(({ key }) => key === this.sort.key);
    const keys = new Map(this.shown.map((row) => [row, plainOrder(column.value(row))]));
    const turn = this.sort.down ? -1 : 1;
    this.shown.sort((a, b) => {
      const [x, y] = [keys.get(a), keys.get(b)];
      if (x === y) return a - b;
      if (x === null || y === null) return x === null ? 1 : -1; // what is not known is last, either way
      return (x < y ? -1 : 1) * turn;
    });
    for (const head of this.heads.children) {
      const mine = head.dataset.key === this.sort.key;
      head.setAttribute("aria-sort", mine ? (this.sort.down ? "descending" : "ascending") : "none");
      head.firstChild.textContent = this.columns.find(({ key }) => key === head.dataset.key).name + (mine ? (this.sort.down ? " ▼" : " ▲") : "");
    }
    this.count.textContent = `${this.shown.length} of ${counted(this.side.rows.length, "step")}`;
    this.body.style.height = `${this.shown.length * TALL}px`;
    this.grid.classList.toggle("few", this.shown.length < 14);
    this.grid.setAttribute("aria-rowcount", String(this.shown.length + 1));
    this.later();
  }

  // The rows in view; on paper, all of them.
  draw(all) {
    const from = all ? 0 : Math.max(0, Math.floor(this.grid.scrollTop / TALL) - 6);
    const to = all ? this.shown.length : Math.min(this.shown.length, from + Math.ceil(this.grid.clientHeight / TALL) + 12);
    const lines = [];
    for (let i = from; i < to; i++) {
      const row = this.shown[i];
      const line = make("div", row === this.side.row ? "line on" : "line");
      line.dataset.row = row;
      line.style.top = `${i * TALL}px`;
      line.setAttribute("role", "row");
      line.setAttribute("aria-rowindex", String(i + 2));
      line.setAttribute("aria-selected", String(row === this.side.row));
      for (const column of this.columns) {
        const text = column.cell(row);
        const cell = make("div", column.left ? "left" : "", text);
        cell.setAttribute("role", "gridcell");
        if (column.key === "kept" && this.side.falseCopy(row)) {
          cell.textContent = "× 0";
          cell.classList.add("bad");
        }
        if (column.left) cell.title = text;
        if (column.key === "written" && this.side.cut(row)) cell.replaceChildren(...this.ended(row));
        line.append(cell);
      }
      lines.push(line);
    }
    this.body.replaceChildren(...lines);
  }

  // What a step wrote, where some of it stood behind the text's end.
  ended(row) {
    const words = this.side.written(row).map((id) => flat(this.side.string(id)));
    const end = words.length - this.side.cut(row);
    return [`${words.slice(0, end).join(BETWEEN)}, cut: `, make("s", "", words.slice(end).join(BETWEEN))];
  }

  mark(row, scroll) {
    const at = this.shown.indexOf(row);
    if (scroll && at >= 0) {
      const [top, view] = [at * TALL, this.grid.clientHeight - TALL];
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      else if (top + TALL > this.grid.scrollTop + view) this.grid.scrollTop = top + TALL - view;
    }
    this.later();
  }
}

function plainOrder(value) {
  if (value === undefined || value === null) return null;
  return value === "-inf" ? -Infinity : value === "inf" ? Infinity : typeof value === "string" ? value.toLowerCase() : value;
}
