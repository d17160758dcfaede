// Says every other second that the board is in sight, and at once when it comes into sight again: for nobody the kernel makes no picture.
class Looking {
  constructor(board) {
    this.board = board; this.seen = false;
    this.eye = new IntersectionObserver((all) => { this.seen = all[all.length - 1].isIntersecting; this.say(); });
    this.eye.observe(board.root);
    this.say = () => { if (this.seen && !document.hidden && board.live) board.send({do: "look"}); };
    document.addEventListener("visibilitychange", this.say);
    this.timer = setInterval(this.say, 2000);
  }
  dispose() { this.eye.disconnect(); clearInterval(this.timer); document.removeEventListener("visibilitychange", this.say); }
}
