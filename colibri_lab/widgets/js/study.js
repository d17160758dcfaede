// A card of tabs for what one does with a run: the kernel sends its contents when they change, not with each frame.
class StudyPanel {
  constructor(board, pages) {
    this.board = board; this.pages = pages; this.chosen = 0;
    Object.assign(this, card("study", "Study"));
    const id = Math.random().toString(36).slice(2);
    this.tabs = pages.map((page, i) => {
      const tab = h("button", {type: "button", role: "tab", id: `s${id}${i}`, "aria-controls": `q${id}${i}`}, page.title);
      tab.addEventListener("click", () => this.choose(i));
      tab.addEventListener("keydown", (e) => stepTab(this, e, i));
      Object.assign(page.node, {id: `q${id}${i}`});
      if (pages.length > 1) { page.node.setAttribute("role", "tabpanel"); page.node.setAttribute("aria-labelledby", tab.id); }
      return tab;
    });
    if (pages.length > 1) this.node.querySelector("b").replaceWith(h("div", {class: "cl-choice", role: "tablist", "aria-label": "study"}, ...this.tabs));
    else put(this.node.querySelector("b"), pages[0].title);
    this.body.append(...pages.map((page) => page.node));
    this.foot.remove();
    board.model.on("change:study", this.changed = () => this.told());
    this.timer = setInterval(() => this.watch(), 2000);
    this.told();
    this.choose(0);
  }
  // work that is only done while somebody looks
  watch() { if (this.pages[this.chosen].watched && this.board.live && !document.hidden && this.node.offsetWidth) this.board.send({do: "watch"}); }
  dispose() { clearInterval(this.timer); for (const page of this.pages) if (page.dispose) page.dispose(); this.board.model.off("change:study", this.changed); }
  told() { for (const page of this.pages) page.told(this.board.model.get("study") || {}); }
  choose(i) {
    this.chosen = i;
    this.tabs.forEach((tab, j) => { tab.setAttribute("aria-selected", i === j); tab.tabIndex = i === j ? 0 : -1; this.pages[j].node.hidden = i !== j; });
    this.watch();
    this.board.redraw();
  }
  draw(f) {
    const page = this.pages[this.chosen];
    (page.tabled && page.tabled.on ? page.tabled : page).draw(f);
  }
}

// keys typed into a field belong to it, not to the notebook around it
function own(field) {
  for (const kind of ["keydown", "keyup", "keypress"]) field.addEventListener(kind, (e) => e.stopPropagation());
  return field;
}
