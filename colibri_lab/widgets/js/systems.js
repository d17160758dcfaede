// The systems, one tab each: their counters over time as columns, their figures in words. What there is to draw comes
// from the kernel once, as data (view/systems.py); a frame brings numbers alone.
class SystemsPanel {
  // only: the name of the one system to show, else all are tabs
  constructor(board, only = null) {
    this.board = board; this.specs = board.model.get("systems") || []; this.chosen = 0;
    const alone = this.specs.findIndex((spec) => spec.name === only), title = alone < 0 ? "Systems" : this.specs[alone].title;
    Object.assign(this, card("systems", title));
    const id = Math.random().toString(36).slice(2);
    this.tabs = this.specs.map((spec, i) => {
      const tab = h("button", {type: "button", role: "tab", id: `t${id}${i}`, "aria-controls": `p${id}`}, spec.title);
      tab.addEventListener("click", () => this.choose(i));
      tab.addEventListener("keydown", (e) => stepTab(this, e, i));
      return tab;
    });
    if (alone < 0) {
      this.node.querySelector("b").replaceWith(h("div", {class: "cl-tabs", role: "tablist", "aria-label": "systems"}, ...this.tabs));
      this.body.setAttribute("role", "tabpanel");
    }
    Object.assign(this.body, {id: `p${id}`, className: "cl-body cl-split"});
    this.chart = h("div", {class: "cl-chart"}); this.facts = h("dl", {class: "cl-facts"});
    this.off = h("p", {class: "cl-off"}); this.warn = h("ul", {class: "cl-warn", "aria-label": "warnings"});
    this.say = h("div", {class: "cl-say", role: "status"});  // room of its own: a column has much to say
    this.readout.remove();
    this.foot.append(this.say);
    this.pages = new PagesPart(board);
    this.body.append(this.off, this.pages.node, this.chart, h("div", null, this.facts, this.warn));
    this.tabled = new TableView(board, this, title);
    this.surface = new Surface(board, {body: this.chart, tabled: this.tabled}, 196, {pick: (x) => this.pick(x), walk: (dx) => this.walk(dx)});
    this.choose(Math.max(0, alone));
  }
  choose(i) {
    this.chosen = i;
    this.tabs.forEach((tab, j) => { tab.setAttribute("aria-selected", i === j); tab.tabIndex = i === j ? 0 : -1; });
    this.tabled.at = 0;
    if (this.tabs[i]) { this.body.setAttribute("aria-labelledby", this.tabs[i].id); this.node.dataset.system = this.specs[i].name; }
    this.board.redraw();
  }
  get left() { return 68; }
  count(f) { return f.a.age.length; }
  at(f, i) { return this.left + i * (this.surface.width - this.left) / this.count(f); }
  pick(x) {
    const f = this.board.frame, n = f ? this.count(f) : 0, i = n ? Math.floor((x - this.left) / ((this.surface.width - this.left) / n)) : -1;
    return i >= 0 && i < n ? {kind: "column", column: i} : null;
  }
  walk(dx) {
    const f = this.board.frame, n = f ? this.count(f) : 0, now = n ? this.found(f) : -1;
    return n ? {kind: "column", column: Math.max(0, Math.min(n - 1, now < 0 ? n - 1 : now + dx))} : null;
  }
  // the column that is pointed at, here or by a token
  found(f) {
    const at = this.board.focus, token = stripColumn(f, at), i = at && at.kind === "column" ? at.column : token >= 0 ? momentOf(f, token) : -1;
    return i < this.count(f) ? i : -1;
  }
  // [line, its row of bytes] of the chosen system
  lines(f) {
    const first = this.specs.slice(0, this.chosen).reduce((sum, s) => sum + s.lines.length, 0), n = this.count(f);
    return this.specs[this.chosen].lines.map((line, j) => [line, f.rows.indexOf(first + j)]).filter(([, row]) => row >= 0)
      .map(([line, row]) => [line, f.a.sys.subarray(row * n, (row + 1) * n)]);
  }
  value(line, byte) {
    const told = this.board.frame.systems[this.chosen], v = byte / 254 * told.tops[line.lane];
    return this.specs[this.chosen].lanes[line.lane].whole ? Math.round(v) : v;
  }
  unit(lane, v) {
    const {unit} = this.specs[this.chosen].lanes[lane];
    return unit === "share" ? percent(v) : unit === "permille" ? percent(v / 1000) : unit === "bytes/s" ? `${bytes(v)}/s` : unit === "s/s" ? `${ms(v * 1000)} a second` : plain(v);
  }
  ago(tenths) { return tenths ? `${(tenths / 10).toFixed(1)} s before the end` : "newest"; }
  describe(f, i) {
    const parts = this.lines(f).filter(([, row]) => row[i] !== 255 && row[i]).map(([line, row]) => `${line.label} ${this.unit(line.lane, this.value(line, row[i]))}`);
    const said = f.marks[this.chosen].filter(([at]) => at === i).map(([, words]) => words);
    const exact = f.systems[this.chosen].tops.every((top, lane) => top <= 254 || !this.specs[this.chosen].lanes[lane].whole);
    return `${this.ago(f.a.age[i])}${exact ? "" : ", about"}: ${[...parts, ...said].join(", ") || "nothing"}`;
  }
  fact([label, kind], [value, whole]) {
    if (value === null || value === undefined) return [label, "off"];
    if (kind === "ratio") return [label, whole ? num(value / whole) : "–"];
    const text = kind === "bytes" ? bytes(value) : kind === "seconds" ? ms(value * 1000) : plain(value);
    return [label, whole ? `${text} (${percent(value / whole)})` : text];
  }
  draw(f) {
    const spec = this.specs[this.chosen], told = f.systems && f.systems[this.chosen];
    this.node.hidden = !told;
    if (!told) return;
    this.specs.forEach((s, i) => {
      const {on} = f.systems[i];
      this.tabs[i].hidden = s.special && !on;
      put(this.tabs[i], s.title + (on || s.special ? "" : " · off"));
    });
    this.chart.hidden = this.facts.hidden = !told.on;
    this.pages.node.hidden = !told.on || spec.name !== "pages";
    if (!this.pages.node.hidden) this.pages.draw(f);
    this.off.hidden = told.on;
    put(this.off, told.on ? "" : `off: ${spec.off}`);
    const facts = told.on ? spec.facts.map((fact, i) => this.fact(fact, told.facts[i])) : [];
    const warnings = spec.name === "router" ? f.warnings : [], key = JSON.stringify([facts, warnings]);
    if (this.shown !== key) {
      this.shown = key;
      this.facts.replaceChildren(...facts.map(([label, value]) => h("div", null, h("dt", null, label), h("dd", null, value))));
      this.warn.replaceChildren(...warnings.map((text) => h("li", null, `⚠ ${text}`)));
    }
    const n = this.count(f), here = told.on ? this.found(f) : -1, marks = told.on ? f.marks[this.chosen] : [];
    put(this.say, here >= 0 ? this.describe(f, here) : "");
    put(this.sub, !told.on ? "" : marks.length ? marks[marks.length - 1][1] : n ? `the last ${(f.a.age[0] / 10).toFixed(f.a.age[0] < 100 ? 1 : 0)} s` : "");
    const lines = told.on ? this.lines(f) : [];
    setLegend(this.legend, lines.map(([line]) => [line.label, line.colour, line.draw === "stack" ? "" : line.draw === "line" ? "line" : "dash"]));
    if (!told.on) return;
    const g = this.surface.begin(`${spec.title}: ${facts.map((pair) => pair.join(" ")).join(", ")}` + (marks.length ? `. Last change: ${marks[marks.length - 1][1]}` : ""));
    const lanes = spec.lanes.map((lane, i) => i).filter((i) => lines.some(([line]) => line.lane === i)), high = this.surface.height / Math.max(1, lanes.length);
    lanes.forEach((lane, i) => this.lane(g, f, lane, i * high + 15, (i + 1) * high - 3, lines.filter(([line]) => line.lane === lane), told.tops[lane]));
    for (const [i] of marks) { g.fillStyle = MARK; g.fillRect(this.at(f, i + 1) - 1, 0, 1.5, this.surface.height); g.beginPath(); g.moveTo(this.at(f, i + 1) - 5, 0); g.lineTo(this.at(f, i + 1) + 4, 0); g.lineTo(this.at(f, i + 1), 6); g.fill(); }
    if (here >= 0) { g.strokeStyle = this.board.theme.fg; g.lineWidth = 1.5; g.strokeRect(this.at(f, here) - 1, 1, (this.surface.width - this.left) / n + 1, this.surface.height - 2); }
  }
  table(f) {
    const spec = this.specs[this.chosen], lines = this.lines(f), n = this.count(f);
    const said = (i) => f.marks[this.chosen].filter(([at]) => at === i).map(([, words]) => words).join("; ");
    const rows = Array.from({length: Math.min(n, 24)}, (_, j) => {
      const i = n - 1 - j;
      return [this.ago(f.a.age[i]), ...lines.map(([line, row]) => (row[i] === 255 ? "–" : this.unit(line.lane, this.value(line, row[i])))), said(i)];
    });
    return {caption: f.systems[this.chosen].on ? `${spec.title} over time, newest first` : `off: ${spec.off}`,
      head: ["", ...lines.map(([line]) => line.label), "what changed"], rows};
  }
  lane(g, f, lane, top, zero, lines, most) {
    const theme = this.board.theme, n = this.count(f), w = (this.surface.width - this.left) / n, bar = w > 3 ? w - 1 : w, tall = zero - top, base = new Float64Array(n);
    g.fillStyle = theme.mute; g.textAlign = "left"; g.fillText(this.specs[this.chosen].lanes[lane].title, this.left, top - 8);
    g.textAlign = "right"; g.fillText(this.unit(lane, most).replace(" a second", "/s"), this.left - 6, top + 2); g.fillText("0", this.left - 6, zero - 3); g.textAlign = "left";
    g.fillStyle = theme.line; g.fillRect(this.left, zero, this.surface.width - this.left, 1); g.fillRect(this.left, top, this.surface.width - this.left, 1);
    for (const [line, row] of lines) {
      if (line.draw === "stack") {
        g.fillStyle = line.colour;
        for (let i = 0; i < n; i++) if (row[i] && row[i] !== 255) { const v = row[i] / 254 * tall; base[i] += v; g.fillRect(this.at(f, i), zero - base[i], bar, v); }
        continue;
      }
      g.strokeStyle = line.colour; g.lineWidth = 1.8; g.setLineDash(line.draw === "dashes" ? [5, 3] : []); g.beginPath();
      for (let i = 0, pen = false; i < n; i++) {
        pen = pen && row[i] !== 255;
        if (row[i] === 255) continue;
        const y = zero - row[i] / 254 * tall;
        if (pen) g.lineTo(this.at(f, i), y); else g.moveTo(this.at(f, i), y);
        g.lineTo(this.at(f, i + 1), y); pen = true;
      }
      g.stroke(); g.setLineDash([]);
    }
  }
}
