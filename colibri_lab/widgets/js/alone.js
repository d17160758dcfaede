// One panel of a board, drawn by the board's own code from the board's own data.
export default {
  async render({model, el, host}) {
    try {
      const {exports} = await host.getWidget(model.get("board"));
      return exports.open(el, model.get("panel"));
    } catch (error) {
      el.textContent = "The board of this panel is gone: run the cell again.";
    }
  },
};
