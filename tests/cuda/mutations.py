"""The bugs that tests/cuda/mutants.py plants, one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.ops.models import Shape

PLAIN = Shape()


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in a file, at its `nth` occurrence; seen on a shape, with a router, in a precision. file: of
    kernels/cuda, or a path from the top. by: what looks for it, see mutants.py."""

    what: str
    file: str
    old: str
    new: str
    nth: int = 0
    shape: Shape = PLAIN
    router: str = "softmax"
    precision: str = "fast"
    by: str = "model"


FP = Shape(dtype="fp32", group=0, kv_dtype="fp32")
WIDE = Shape(hidden=290, ffn=310, layers=1, vocab=90)
LONG = replace(FP, layers=1, positions=300, capacity=270, seats=1, ffn=4, experts=2, heads=1, kv_heads=1, hidden=16)
MANY = Shape(hidden=72, experts=40, top_k=3, dtype="fp32", group=0, kv_dtype="fp32")
SAMPLE, PLAN = "sample.cu", "plan_picks.cu"
WHOLE, GRAPHS = "colibri_lab/ops/cuda_whole.py", "colibri_lab/ops/graphs.py"
CHOOSING = "colibri_lab/engine/choosing.py"
MUTANTS = (
    Mutant("a barrier of block_sum is missing", "common.cuh", "__syncthreads();", "", 0),
    Mutant(
        "warp_sum is one step short",
        "common.cuh",
        "int lanes = 16; lanes; lanes >>= 1) v +=",
        "int lanes = 8; lanes; lanes >>= 1) v +=",
    ),
    Mutant(
        "block_sum leaves out a warp",
        "common.cuh",
        "int w = 0; w < warps; ++w) sum",
        "int w = 1; w < warps; ++w) sum",
        0,
        WIDE,
    ),
    Mutant("a page table is read one page off", "tiles.cuh", "m.table + page", "m.table + page + 1", 0, WIDE),
    Mutant(
        "pages past the first hold one tile less",
        "tiles.cuh",
        "pages * (u32)m.per_page",
        "pages * (u32)(m.per_page - 1)",
        0,
        replace(WIDE, dtype="fp32", group=0, ffn=900),
    ),
    Mutant(
        "tiles go on past the end of the first page",
        "tiles.cuh",
        "if (tile >= first)",
        "if (tile > first)",
        0,
        replace(WIDE, ffn=900),
    ),
    Mutant("nibbles are swapped", "matmul.cu", "word >> 4 & 0x0f0f0f0fu), high", "word >> 4 & 0x0f0f0f0fu), low"),
    Mutant(
        "a row's scale is its neighbour's",
        "matmul.cu",
        "scale[i] = to_float(scales[i])",
        "scale[i] = to_float(scales[i ^ 1])",
    ),
    Mutant("no barrier before groups are added", "matmul.cu", "__syncthreads();", ""),
    Mutant("rows past the end are stored", "matmul.cu", "&& row < rows) y", ") y", 0, Shape(hidden=50)),
    Mutant(
        "the last group is read whole",
        "matmul.cu",
        "end = min(group, cols - g * group)",
        "end = group",
        0,
        Shape(hidden=50),
        precision="exact",
    ),
    Mutant("a job's second input is the first", "matmul.cu", "job.first + min(b, job.count - 1)", "job.first", 0),
    Mutant(
        "shared memory holds a warp less",
        "matmul.cu",
        "(share * kBatch + b) * kTileRows",
        "((share + 8) * kBatch + b) * kTileRows",
    ),
    Mutant("all groups go through one room", "matmul.cu", "(turn & 1)", "0", 0, replace(WIDE, hidden=1100)),
    Mutant("codes are not rounded", "quantise_rows.cu", "__float2int_rn(in[k] * inverse)", "(int)(in[k] * inverse)"),
    Mutant("padding of a group is not zero", "quantise_rows.cu", "fine && k < cols ?", "fine ?", 0, Shape(hidden=50)),
    Mutant("RoPE turns the wrong way", "project_heads.cu", "a * cosine - b * sine", "a * cosine + b * sine"),
    Mutant(
        "no barrier between norm and RoPE",
        "project_heads.cu",
        "__syncthreads();",
        "",
        1,
        Shape(qk_norm="head", head_dim=8, heads=8, kv_heads=4),
    ),
    Mutant(
        "keys of a row go to its neighbour",
        "project_heads.cu",
        "(i64)(staging + row) * width;\n  for",
        "(i64)(staging + (row ^ 1)) * width;\n  for",
    ),
    Mutant(
        "a token is left out of a split",
        "attention.cu",
        "t = split * kSplit + warp",
        "t = split * kSplit + warp + 1",
        0,
        FP,
    ),
    Mutant("the splits are not joined", "attention.cu", "(count[row] + kSplit - 1) / kSplit", "1", 0, LONG),
    Mutant("no barrier before the warps' parts are joined", "attention.cu", "__syncthreads();", "", 0, FP),
    Mutant("all heads read one head's keys", "attention.cu", "group = head / (heads / kv_heads)", "group = 0", 0, FP),
    Mutant(
        "the near end of the sight is one short",
        "attention.cu",
        "t >= end - recent",
        "t > end - recent",
        0,
        replace(FP, recent=2, sinks=1),
    ),
    Mutant(
        "ties go to the higher index",
        "choose.cuh",
        "if (keys[e] > best)",
        "if (keys[e] >= best)",
        0,
        replace(MANY, experts=70),
        "int8_lut",
    ),
    Mutant("a shut-out expert can be chosen again", "choose.cuh", "keys[at] = kNone", "keys[at] = keys[at]", 0, MANY),
    Mutant(
        "lanes leave before a shuffle",
        "router.cu",
        "if (e >= experts) return;",
        "if (e >= experts || lane > 30) return;",
    ),
    Mutant("the threshold moves the wrong way", "router.cu", "found < k);", "found > k);", 0, MANY, "bit_level"),
    Mutant(
        "the bound of two_stage has no error",
        "two_stage.cu",
        "high[e] >= bar;\n  found",
        "low[e] > bar;\n  found",
        0,
        MANY,
        "two_stage",
    ),
    Mutant("silu without its weight", "expert_ffn.cu", "* up[at]", ""),
    Mutant("a row adds its neighbour's picks", "expert_ffn.cu", "p < begin[row + 1]", "p < begin[row + 1] + 1"),
    Mutant("argmax takes any", "head.cu", "best = min(best, __shfl", "best = max(best, __shfl"),
    Mutant("sample: no barrier before the warps are joined", SAMPLE, "__syncthreads();", ""),
    Mutant("sample: no barrier after the draw", SAMPLE, "__syncthreads();\n    chosen", "chosen"),
    Mutant("sample: the cut leaves out the last of equals", SAMPLE, "i <= last", "i < last"),
    Mutant("sample: the search stops one short", SAMPLE, "room, false) >= target", "room, false) > target"),
    Mutant("sample: a penalty makes negative logits likelier", SAMPLE, "v * penalty", "v / penalty"),
    Mutant("sample: another seat's tokens are penalised", SAMPLE, "seat[row] * vocab", "row * vocab"),
    Mutant("sample: min_p is not looked at", SAMPLE, " && !(far < 0.0)", ""),
    Mutant("sample: a draw on an edge is called sure", SAMPLE, "low && high", "1"),
    Mutant("sample: a token's logit is the first row's", SAMPLE, "logits[(i64)row * vocab + chosen]", "logits[chosen]"),
    Mutant("the largest logit is the first", "head.cu", "= x[best];", "= x[0];", by="choosing"),
    Mutant(
        "two_stage remembers that a row had no bound",
        "two_stage.cu",
        "  hopeless[blockIdx.x] = 0;\n",
        "",
        0,
        MANY,
        "two_stage",
    ),
    Mutant("plan: no barrier before picks are counted", PLAN, "__syncthreads();", "", by="whole"),
    Mutant("plan: no barrier before jobs are made", PLAN, "__syncthreads();", "", 1, by="whole"),
    Mutant("plan: a job has one pick too many", PLAN, "min(batch, same", "min(batch + 1, same", by="whole"),
    Mutant(
        "plan: a row adds experts as they rank",
        PLAN,
        "expert[q] < mine || (expert[q] == mine && q < p)",
        "q < p",
        by="whole",
    ),
    Mutant("plan: the layer is forgotten", PLAN, "layer * experts + mine", "mine", by="whole"),
    Mutant(
        "layers settle from one staging",
        "project_heads.cu",
        "(int)blockIdx.y * apart + row",
        "row",
        by="whole",
    ),
    Mutant("layers wait in one staging", WHOLE, "len(self._kv.k) + layer * self.most", "len(self._kv.k)", by="whole"),
    Mutant(
        "a replay gets the words of the step before",
        WHOLE,
        "        given.write(self._device)\n",
        "        self.graphs.replays or given.write(self._device)\n",
        by="whole",
    ),
    Mutant("rows that fill up sit on somebody's seat", WHOLE, "= 0, seats, np", "= 0, 0, np", by="whole"),
    Mutant("a longer history replays a shorter one's graph", WHOLE, "run((b, splits),", "run((b,),", by="whole"),
    Mutant("a larger batch replays a smaller one's graph", WHOLE, "run((b, splits),", "run((splits,),", by="whole"),
    Mutant("a graph is kept when its stamp changes", GRAPHS, "stamped == stamp", "stamped", by="whole"),
    Mutant(
        "the page table's place is no part of the stamp",
        WHOLE,
        "(frames.frames, frames.table,",
        "(frames.frames,",
        by="whole",
    ),
    Mutant("the audit is no part of the stamp", WHOLE, "routing.bits, routing.audit,", "routing.bits,", by="whole"),
    Mutant("the first step of a shape is captured and not done", GRAPHS, "        work()\n", "", by="whole"),
    Mutant(
        "the host's table is not told of the slots",
        WHOLE,
        "kv.where[at], kv.first[at] = target, first",
        "kv.first[at] = first",
        by="whole",
    ),
    Mutant(
        "choosing: an unsure token is drawn with another number",
        CHOOSING,
        "choose(logits, draw.random)",
        "choose(logits)",
        by="choosing",
    ),
    Mutant("choosing: the sampler is not told of a token", CHOOSING, "request.sampler.saw(id)", "pass", by="choosing"),
    Mutant(
        "choosing: a seat's next request has seen what the last one saw",
        CHOOSING,
        "self._seated.get(request.seat) is not request",
        "request.seat not in self._seated",
        by="choosing",
    ),
    Mutant(
        "choosing: what the host chose is not seen on the device",
        CHOOSING,
        "self._seated.pop(request.seat, None)  # what",
        "pass  # what",
        by="choosing",
    ),
    Mutant(
        "choosing: an unsure token keeps the device's logit",
        CHOOSING,
        "value = float(logits[id])",
        "pass",
        by="choosing",
    ),
)
