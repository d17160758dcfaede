/* Blocks of crc32.c by the carry-less multiplication of x86-64, whatever the ISA level: asked for when it runs. */
#include <immintrin.h>

static uint64_t crc_far[2], crc_near[2]; /* carry a lane over 512 and over 128 bits: its low half, its high half */

/* x^n modulo the polynomial, lowest power in the highest of 33 bits, as products of such polynomials want it. */
static uint64_t crc_power(int n) {
    uint32_t c = 0x80000000u;
    while (n--) c = crc_times_x(c);
    return (uint64_t)c << 1;
}

__attribute__((target("pclmul,sse2"))) static __m128i crc_carry(__m128i a, const uint64_t *by, __m128i onto) {
    __m128i k = _mm_loadu_si128((const __m128i *)by);
    return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(a, k, 0x00), _mm_clmulepi64_si128(a, k, 0x11)));
}

/* size: whole blocks, at least one */
__attribute__((target("pclmul,sse2"))) static uint32_t crc_by_blocks(uint32_t c, const uint8_t *p, int64_t size) {
    __m128i lane[4];
    uint8_t last[16];
    for (int i = 0; i < 4; i++) lane[i] = _mm_loadu_si128((const __m128i *)p + i);
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)c));
    for (p += 64, size -= 64; size; p += 64, size -= 64)
        for (int i = 0; i < 4; i++) lane[i] = crc_carry(lane[i], crc_far, _mm_loadu_si128((const __m128i *)p + i));
    for (int i = 1; i < 4; i++) lane[0] = crc_carry(lane[0], crc_near, lane[i]);
    _mm_storeu_si128((__m128i *)last, lane[0]);
    return crc_by_table(0, last, 16);
}
