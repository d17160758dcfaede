// The same frame as words and numbers: a table in the place of a panel's picture, at a pace that can be read.
class TableView {
  // panel.table(f) gives {caption, head, rows}; the first cell of a row is its header
  constructor(board, panel, title) {
    this.board = board; this.panel = panel; this.at = 0;
    this.table = h("table", {class: "cl-table"}, h("caption"), h("thead", null, h("tr")), h("tbody"));
    this.node = h("div", {class: "cl-scroll", tabindex: "0", role: "region", "aria-label": `${title} as a table`}, this.table);
    this.node.hidden = true;
    this.button = h("button", {type: "button", class: "cl-tool", "aria-pressed": "false", "aria-label": `${title} as a table`, title: "as a table (t)"}, "▤");
    this.button.addEventListener("click", () => this.turn());
    this.node.addEventListener("keydown", (e) => {
      if (e.key !== "t" && e.key !== "Escape") return;
      this.turn(); e.preventDefault(); e.stopPropagation();
    });
    panel.tools.append(this.button);
    panel.body.after(this.node);
  }
  get on() { return !this.node.hidden; }
  // to the table and back; what had the keyboard keeps it
  turn() {
    const inside = this.panel.body.contains(document.activeElement) || document.activeElement === this.node;
    this.node.hidden = this.on;
    this.panel.body.hidden = this.on;
    this.panel.foot.hidden = this.on;
    this.button.setAttribute("aria-pressed", this.on);
    this.at = 0;
    this.board.setFocus(null);
    if (inside) (this.on ? this.node : this.panel.body.querySelector("[tabindex]")).focus();
    this.board.redraw();
  }
  draw(f) {
    if (performance.now() - this.at < 1000) return this.later();
    this.at = performance.now();
    const {caption, head, rows} = this.panel.table(f);
    put(this.table.caption, caption);
    this.fill(this.table.tHead.rows[0], head, () => h("th", {scope: "col"}));
    const body = this.table.tBodies[0];
    while (body.rows.length > rows.length) body.lastChild.remove();
    rows.forEach((row, i) => this.fill(body.rows[i] || body.appendChild(h("tr")), row, (j) => (j ? h("td") : h("th", {scope: "row"}))));
  }
  // the last picture of a run is shown too, even if no other comes
  later() { clearTimeout(this.timer); this.timer = setTimeout(() => this.board.redraw(), 1010); }
  fill(row, texts, make) {
    while (row.cells.length > texts.length) row.lastChild.remove();
    texts.forEach((text, j) => put(row.cells[j] || row.appendChild(make(j)), String(text)));
  }
}
