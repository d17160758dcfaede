"""Generated text goes to the board and to no cell, whichever cell runs meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TOP = Path(__file__).resolve().parents[2]
CELLS = [
    "from colibri_lab.widgets.dashboard import connect\nfrom tests.widgets.fake import FakeEngine\n"
    "lab = connect(FakeEngine(rate=200))\nlab",
    "lab.generate('Once', max_tokens=120)",
    "import time\nprint('x')\ntime.sleep(0.3)",
    "assert lab.wait(30)\nassert lab.error is None",
    "from colibri_lab.view.frame import unpack\ntext = ''.join(unpack(lab.board.prose)[0]['text']['piece'])\n"
    "assert text == lab.text and len(lab.session.tokens) == 120\nlab.close()",
]


def test_a_worker_s_text_lands_in_no_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TOP), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(book, timeout=90, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in book.cells]
    assert [len(output) for output in outputs] == [1, 0, 1, 0, 0]
    assert outputs[2][0].text == "x\n"
    shown = outputs[0][0].data
    assert set(shown) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert not any(output.output_type == "stream" and output.name == "stderr" for cell in outputs for output in cell)
