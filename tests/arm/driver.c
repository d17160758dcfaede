/* The kernels as a process that takes calls: it maps the memory that a file descriptor is, binds the model in it, and
   answers every call of six integers on its input by the kernel's result on its output. */
#include "colibri.c"
#include <sys/mman.h>
#include <unistd.h>

enum { SIZEOF, BIND, EMBED, ATTN_ROUTER, EXPERT_FFN, HEAD, FIRST_STAGE, SECOND_STAGE, RUN, SETTLE };
#define BASE ((uint8_t *)0x100000000000) /* the addresses in the memory begin here; backend.py has the same */

static int64_t bind_memory(Context **context, int memory, int64_t size, int64_t model) {
    static int64_t mapped;
    colibri_free(*context);
    *context = NULL;
    if (mapped) munmap(BASE, (size_t)mapped);
    mapped = size;
    if (mmap(BASE, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0) != BASE) return -1;
    *context = colibri_bind((const Model *)(BASE + model));
    return *context ? 0 : -1;
}

int main(int argc, char **argv) {
    Context *c = NULL;
    int64_t call[6], result;
    char name[16] = ISA;
    if (argc != 2 || write(1, name, sizeof name) != sizeof name) return 1;
    while (read(0, call, sizeof call) == sizeof call) {
        int a = (int)call[1], b = (int)call[2], d = (int)call[3], e = (int)call[4], f = (int)call[5];
        switch (call[0]) {
        case SIZEOF: result = colibri_sizeof(a); break;
        case BIND: result = bind_memory(&c, atoi(argv[1]), call[1], call[2]); break;
        case EMBED: result = colibri_embed(c, a); break;
        case ATTN_ROUTER: result = colibri_attn_router(c, a, b, d); break;
        case EXPERT_FFN: result = colibri_expert_ffn(c, a, b, d, e, f); break;
        case HEAD: result = colibri_head(c, a); break;
        case FIRST_STAGE: result = colibri_first_stage(c, a, b, d); break;
        case SECOND_STAGE: result = colibri_second_stage(c, a, b, d); break;
        case RUN: result = colibri_run_layers(c, a, b); break;
        case SETTLE: result = colibri_settle_layers(c, a, b, d); break;
        default: return 1;
        }
        if (write(1, &result, sizeof result) != sizeof result) return 1;
    }
    colibri_free(c);
    return 0;
}
