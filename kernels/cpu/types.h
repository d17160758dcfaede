/* What Python passes, once, at bind. The ctypes twins are in colibri_lab/ops/abi.py; sizes are compared at load. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 65536
#define ABSENT (-1) /* of a page table's entry: not in memory */
#define COMING (-2) /* not yet, but on its way */
#define ROWS 16 /* rows of a tile, lanes of a vector */
#define RUN_ROWS 32 /* rows of a step that layers.c takes; ops/types.py has the same */
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum { FP32, FP16, INT8, INT4 };
enum { SOFTMAX, INT8_LUT, BIT_LEVEL, TWO_STAGE }; /* routers; ops/routing.py has the same order */
enum { OK, NON_FINITE, MISSING_PAGE, BAD_INDEX, UNBOUND };
enum { TOKEN, SEAT, POSITION, KV_DST, EXPERT, OUT_ROW, WHERE, LAYER, COUNT }; /* what a BAD_INDEX was found in */

/* A call returns 0 or kind | what << 8 | number << 16 (number: a row, or the expert whose page is missing). */
INLINE int64_t failure(int kind, int what, int64_t number) { return kind + what * 256 + number * 65536; }

typedef struct {
    const uint8_t *data; /* first page of a resident matrix; NULL for experts, which are read through the page table */
    int64_t start;
    int32_t rows, cols, dtype, group;
    int32_t groups; /* ceil(cols / group): groups that hold weights; those past it are padding and never read */
    int32_t tile_cols, tile_bytes, groups_per_tile, tiles_across, tiles_per_page;
} Matrix;

typedef struct {
    Matrix gate, up, down;
} Ffn;

typedef struct {
    const float *input_norm, *post_norm, *qkv_bias, *o_bias, *q_norm, *k_norm, *gate, *shared_gate;
    Matrix qkv, o;
    Ffn dense, shared;
    int32_t heads, window, q_norm_len, k_norm_len, has_dense, has_shared, has_clip;
    float scale, clip;
    const int16_t *gate_codes; /* two_stage: [experts][code_width], zeros past hidden; fours of rows */
    const double *gate_facts;  /* two_stage: [experts][4] scale, |gate - codes| + rounding, |codes|, |gate| (2-norms) */
} Layer;

typedef struct Reader Reader; /* reader.c */

typedef struct {
    const Layer *layers;
    const float *final_norm, *cos, *sin;
    const void *embedding; /* row-major, or NULL: rows are read from the head */
    Matrix head;
    Ffn expert;
    int32_t n_layers, hidden, vocab, experts, top_k, normalise, embedding_dtype, rope_positions, exact, threads;
    float eps;
    /* KVPool */
    void *k, *v;
    int32_t *where; /* [seats][n_layers][positions] */
    int16_t *first; /* the same: the expert that ranked first, -1 in a dense layer or when it is not known yet */
    int64_t *seen;  /* [n_layers][4], see count_sights */
    int64_t tokens, staging;
    int32_t kv_dtype, kv_heads, head_dim, seats, positions, recent, sinks; /* recent 0: exact attention */
    /* ExpertPages */
    const uint8_t *frames;
    const int32_t *table; /* [n_layers][experts][table_pages]; readers fill it in while a kernel runs */
    int64_t *waited;      /* [1] nanoseconds that kernels waited for pages on their way */
    Reader *reader;        /* whom to ask for pages that are on their way, or NULL: others bring them */
    int64_t n_frames;
    int32_t table_pages, expert_pages; /* pages that the table has room for, and that an expert fills */
    /* Rows */
    int32_t capacity;
    const int32_t *token, *position, *seat, *kv_dst, *out_row;
    float *x, *ffn_in, *router_logits, *weights, *logits, *logsumexp;
    int32_t *experts_of_row, *argmax;
    int64_t *spent; /* [2] nanoseconds so far: choosing experts, grouping rows by expert */
    /* Runs */
    int32_t *run_experts; /* [n_layers][RUN_ROWS][top_k] */
    float *run_weights;   /* the same */
    const int32_t *run_kv_dst; /* [n_layers][RUN_ROWS] */
    int32_t *reached;          /* [1] a layer */
    int64_t *run_spent;        /* [2] nanoseconds so far: attn_router, expert_ffn */
    /* Routing */
    int32_t router, router_bits, router_audit, code_width, code_block;
    float threshold_at, threshold_step; /* bit_level: first guess and its slope; see router_bits.c */
    const uint16_t *sigmoid;            /* bit_level: [32768] */
    int64_t sigmoid_from;               /* the first index whose value is not 0 */
    int64_t *router_counts;             /* [n_layers][8], see Tally */
    float *router_span;                 /* [n_layers][2] smallest and largest logit so far */
} Model;

INLINE int min_int(int a, int b) { return a < b ? a : b; }
INLINE int max_int(int a, int b) { return a > b ? a : b; }
INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
INLINE int round_up(int a, int b) { return ceil_div(a, b) * b; }
