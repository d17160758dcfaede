// The board: one model, one animation frame at a time, the newest picture wins.
class Board {
  constructor(model, el) {
    this.model = model; this.el = el; this.frame = null; this.story = new Story(); this.focus = null;
    this.pending = 0; this.updates = 0; this.draws = 0; this.live = true; this.words = "";
    this.root = h("div", {class: "cl-board", role: "region", "aria-label": "Colibri Lab board"});
    this.banner = h("div", {class: "cl-banner", role: "alert"});
    this.banner.hidden = true;
    this.trouble = h("div", {class: "cl-banner cl-bad", role: "alert"});
    this.trouble.hidden = true;
    this.tiles = new Tiles(this);
    const [experts, time, prose] = [new ExpertsPanel(this), new TimePanel(this), new ProsePanel(this)];
    const [controls, slots, latency, systems] = [new ControlsPanel(this), new SlotsPanel(this), new LatencyPanel(this), new SystemsPanel(this)];
    this.controls = controls; this.prose = prose;
    this.study = new StudyPanel(this, [new ComparePage(this), new WhatIfPage(this), new TunerPage(this)]);
    this.panels = [this.tiles, experts, time, prose, controls, slots, latency, systems, this.study];
    this.travel = new TravelBar(this);
    this.token = new TokenPanel(this);
    this.panels.unshift(this.token, this.travel);
    this.caption = h("div", {class: "cl-caption"}, h("b", null, "Colibri Lab"), h("span"));
    this.root.append(this.caption, this.banner, this.trouble, this.tiles.node, this.travel.node, h("div", {class: "cl-grid"},
      h("div", {class: "cl-col"}, experts.node, time.node, prose.node, this.token.node), h("div", {class: "cl-col"}, controls.node, slots.node, latency.node)), systems.node, this.study.node);
    el.append(this.root);
    this.watch();
    this.text();
    this.arrived();
    this.send({do: "hello"});
  }
  watch() {
    const on = (name, act) => { this.model.on(name, act); return () => this.model.off(name, act); };
    this.off = [on("change:frame", () => { this.connected(true); this.arrived(); }), on("change:prose", () => this.text()),
      on("comm_live_update", () => this.connected(false)), on("change:can", () => this.redraw())];
    this.size = new ResizeObserver(() => this.redraw());
    this.size.observe(this.root);
    this.themes = new MutationObserver(() => this.restyle());
    for (const node of [document.body, document.documentElement]) this.themes.observe(node, {attributes: true});
    // a picture that was saved comes up in an element that JupyterLab has marked; what happens later is an event
    requestAnimationFrame(() => { if (this.el.closest(".jupyter-widgets-disconnected")) this.connected(false); });
    this.restyle();
  }
  dispose() {
    this.off.forEach((stop) => stop());
    this.size.disconnect(); this.themes.disconnect(); this.controls.dispose(); this.study.dispose(); this.travel.dispose(); this.token.dispose();
    cancelAnimationFrame(this.pending);
  }
  send(message) { this.model.send(message); }
  restyle() {
    const light = document.body.dataset.jpThemeLight;
    this.dark = light ? light === "false" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.root.dataset.theme = this.dark ? "dark" : "light";
    this.theme = readTheme(this.root);
    if (this.story.pieces.length && this.prose.tint !== undefined) this.prose.tintAll();
    this.redraw();
  }
  // the kernel went away, or speaks again
  connected(live) {
    if (live === this.live) return;
    this.live = live;
    this.banner.hidden = live;
    put(this.banner, live ? "" : "The kernel was restarted or is not running: this is the last picture. Run the cell again.");
    this.root.classList.toggle("cl-gone", !live);
    this.redraw();
  }
  arrived() {
    const frame = parseFrame(this.model.get("frame"));
    if (!frame) return;
    this.frame = frame; this.updates++;
    if (!this.story.take(frame)) this.send({do: "hello"});
    this.redraw();
  }
  text() {
    this.story.replace(parseFrame(this.model.get("prose")));
    this.redraw();
  }
  setFocus(focus) {
    const words = JSON.stringify(focus);
    if (words === this.words) return;
    this.words = words; this.focus = focus;
    this.redraw();
  }
  redraw() {
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }
  draw() {
    const f = this.frame;
    if (!f || !this.root.isConnected || !this.root.clientWidth) return;
    this.draws++;
    if (!this.theme.fg) this.restyle();  // the style sheet came after the board
    this.root.classList.toggle("cl-narrow", this.root.clientWidth < 860);
    for (const panel of this.panels) panel.draw(f);
    put(this.caption.lastChild, f.model || "");
    this.trouble.hidden = !f.error;
    put(this.trouble, f.error || "");
    Object.assign(this.root.dataset, {updates: this.updates, draws: this.draws, state: f.state});
  }
}

function render({model, el}) {
  const board = new Board(model, el);
  return () => board.dispose();
}
export default {render};
