/* zlib's crc32. Whole blocks of 64 bytes by carry-less multiplication where the processor has it: a block is a
   polynomial, and four lanes of 128 bits are carried 512 bits on by multiplying with powers of x modulo the CRC's. The
   rest, and elsewhere all, eight bytes at a time by tables: crc_table[k][b] carries byte b over k more bytes. */

static uint32_t crc_table[8][256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;

INLINE uint32_t crc_times_x(uint32_t c) { return c >> 1 ^ (c & 1 ? 0xedb88320u : 0); }

static uint32_t crc_by_table(uint32_t c, const uint8_t *p, int64_t size) {
    for (; size >= 8; p += 8, size -= 8) {
        c ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        c = crc_table[7][c & 255] ^ crc_table[6][c >> 8 & 255] ^ crc_table[5][c >> 16 & 255] ^ crc_table[4][c >> 24] ^
            crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]] ^ crc_table[0][p[7]];
    }
    for (; size > 0; p++, size--) c = c >> 8 ^ crc_table[0][(c ^ *p) & 255];
    return c;
}

#if defined(__x86_64__)
#include "crc32_pclmul.h"
#endif

static void make_crc_table(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t c = b;
        for (int i = 0; i < 8; i++) c = crc_times_x(c);
        crc_table[0][b] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int b = 0; b < 256; b++)
            crc_table[k][b] = crc_table[k - 1][b] >> 8 ^ crc_table[0][crc_table[k - 1][b] & 255];
#if defined(__x86_64__)
    crc_far[0] = crc_power(512 + 32), crc_far[1] = crc_power(512 - 32);
    crc_near[0] = crc_power(128 + 32), crc_near[1] = crc_power(128 - 32);
#endif
}

EXPORT uint32_t colibri_crc32(const uint8_t *p, int64_t size) {
    uint32_t c = 0xffffffffu;
    pthread_once(&crc_once, make_crc_table);
#if defined(__x86_64__)
    int64_t whole = size / 64 * 64;
    if (whole && __builtin_cpu_supports("pclmul")) {
        c = crc_by_blocks(c, p, whole);
        p += whole, size -= whole;
    }
#endif
    return ~crc_by_table(c, p, size);
}
