/* Float32 weights split into bfloat16 ones and what is kept beside them, and joined again: the arithmetic of
 * amp_core.kernels.rounding, each array read and written once. The loops are plain; compilers turn them into
 * vectors of each instruction set. */
#include "common.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SPAN 32768 /* elements that one thread takes at once; even, as two neighbours share a hash */
#define NEAR 1024  /* elements that stay in the nearest cache between two loops */

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* One NaN, which no rounding makes finite. */
INLINE uint32_t one_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits; }

/* To nearest even. */
INLINE uint32_t to_even(float value) {
    uint32_t bits = bits_of(value);
    return value != value ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

INLINE uint32_t hash(uint32_t number, uint32_t first, uint32_t second) {
    uint32_t x = (number + first) * 0xed5ad4bbu;
    x ^= x >> 11;
    x = (x ^ second) * 0xac4c1b51u;
    x ^= x >> 15;
    x *= 0x31848babu;
    return x ^ (x >> 14);
}

/* Add signed 16 bits and half a step of bfloat16. */
INLINE uint32_t round_by(uint32_t bits, uint32_t random) {
    return (one_nan(bits) + ((random ^ 0x8000u) & 0xffffu)) >> 16;
}

/* What one part of an array needs; unused members are 0. */
struct part {
    float *wide;
    uint16_t *low, *kept;
    const int32_t *numbers;
    size_t start, n;
    uint32_t first, second; /* the halves of the key */
};

INLINE void join_loop(struct part p) {
    float *restrict wide = p.wide;
    const uint16_t *restrict low = p.low, *restrict kept = p.kept;
    for (size_t i = 0; i < p.n; i++)
        wide[i] = float_of(((uint32_t)low[i] << 16) + (uint32_t)(int32_t)(int16_t)kept[i]);
}

INLINE void sum_loop(struct part p) {
    float *restrict wide = p.wide;
    const uint16_t *restrict low = p.low, *restrict kept = p.kept;
    for (size_t i = 0; i < p.n; i++)
        wide[i] = float_of((uint32_t)low[i] << 16) + float_of((uint32_t)kept[i] << 16);
}

INLINE void split_loop(struct part p) {
    const float *restrict wide = p.wide;
    uint16_t *restrict low = p.low, *restrict kept = p.kept;
    for (size_t i = 0; i < p.n; i++) {
        uint32_t bits = one_nan(bits_of(wide[i]));
        kept[i] = (uint16_t)bits;
        low[i] = (uint16_t)((bits + 0x8000u) >> 16);
    }
}

INLINE void compensate_loop(struct part p) {
    for (size_t start = 0; start < p.n; start += NEAR) {
        const float *restrict wide = p.wide + start;
        uint16_t *restrict low = p.low + start, *restrict kept = p.kept + start;
        size_t n = p.n - start < NEAR ? p.n - start : NEAR;
        for (size_t i = 0; i < n; i++) {
            uint32_t nearest = to_even(wide[i]);
            float rest = wide[i] - float_of(nearest << 16);
            low[i] = (uint16_t)nearest;
            /* An infinity lacks nothing: inf - inf is NaN. */
            kept[i] = fabsf(rest) < INFINITY ? (uint16_t)to_even(rest) : 0;
        }
        /* What is rounded to half a step makes a tie: added to an odd weight, it would give the next one. */
        for (size_t i = 0; i < n; i++) {
            uint16_t half = (uint16_t)((low[i] & 0x7f80) - (8 << 7)), size = kept[i] & 0x7fff;
            uint16_t moves = size == half ? low[i] & 1 : 0;
            kept[i] = (uint16_t)(kept[i] - (size ? moves : 0));
        }
    }
}

INLINE void stochastic_loop(struct part p) {
    const float *restrict wide = p.wide;
    uint16_t *restrict low = p.low;
    uint32_t pair = (uint32_t)(p.start / 2);
    size_t pairs = p.n / 2;
    for (size_t k = 0; k < pairs; k++) {
        uint32_t random = hash(pair + (uint32_t)k, p.first, p.second);
        low[2 * k] = (uint16_t)round_by(bits_of(wide[2 * k]), random);
        low[2 * k + 1] = (uint16_t)round_by(bits_of(wide[2 * k + 1]), random >> 16);
    }
    if (p.n % 2)
        low[p.n - 1] = (uint16_t)round_by(bits_of(wide[p.n - 1]), hash(pair + (uint32_t)pairs, p.first, p.second));
}

INLINE void numbered_loop(struct part p) {
    const float *restrict wide = p.wide;
    const int32_t *restrict numbers = p.numbers;
    uint16_t *restrict low = p.low;
    for (size_t i = 0; i < p.n; i++) {
        uint32_t number = (uint32_t)numbers[i], random = hash(number >> 1, p.first, p.second);
        low[i] = (uint16_t)round_by(bits_of(wide[i]), random >> (16 * (number & 1u)));
    }
}

typedef void part_loop(struct part p);
enum { JOIN, SUM, SPLIT, COMPENSATE, STOCHASTIC, NUMBERED };

#define LOOPS(SUFFIX, TARGET)                                                                      \
    TARGET static void join_##SUFFIX(struct part p) { join_loop(p); }                              \
    TARGET static void sum_##SUFFIX(struct part p) { sum_loop(p); }                                \
    TARGET static void split_##SUFFIX(struct part p) { split_loop(p); }                            \
    TARGET static void compensate_##SUFFIX(struct part p) { compensate_loop(p); }                  \
    TARGET static void stochastic_##SUFFIX(struct part p) { stochastic_loop(p); }                  \
    TARGET static void numbered_##SUFFIX(struct part p) { numbered_loop(p); }                      \
    static part_loop *const loops_##SUFFIX[] = {join_##SUFFIX,       sum_##SUFFIX,        split_##SUFFIX, \
                                                compensate_##SUFFIX, stochastic_##SUFFIX, numbered_##SUFFIX};

LOOPS(base, )
#ifdef X86
#ifdef __clang__
#define WIDEST "avx2,avx512f,avx512bw,avx512vl,avx512dq"
#else
#define WIDEST "avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"
#endif
LOOPS(of_avx2, __attribute__((target("avx2"))))
LOOPS(of_avx512, __attribute__((target(WIDEST))))

static part_loop *const *chosen_loops(void) {
    int level = amp_level();
    return level == 2 ? loops_of_avx512 : level == 1 ? loops_of_avx2 : loops_base;
}
#else
static part_loop *const *chosen_loops(void) { return loops_base; }
#endif

static void each_part(int kind, struct part whole, int64_t n, int threads) {
    part_loop *loop = chosen_loops()[kind];
    int64_t start;
    (void)threads;
    OMP(parallel for schedule(static) num_threads(threads) if (threads > 1 && amp_may_thread()))
    for (start = 0; start < n; start += SPAN) {
        struct part p = whole;
        p.wide += start;
        p.low += start;
        p.kept = p.kept ? p.kept + start : NULL;
        p.numbers = p.numbers ? p.numbers + start : NULL;
        p.start = (size_t)start;
        p.n = (size_t)(n - start < SPAN ? n - start : SPAN);
        loop(p);
    }
}

/* wide = low + kept, the float32 weights; `exact`: kept are the lower 16 bits, else bfloat16. */
EXPORT void amp_join(float *wide, uint16_t *low, uint16_t *kept, int64_t n, int exact, int threads) {
    each_part(exact ? JOIN : SUM, (struct part){.wide = wide, .low = low, .kept = kept}, n, threads);
}

/* The contrary: round `wide` to `low`, and keep what it lacks. */
EXPORT void amp_split(float *wide, uint16_t *low, uint16_t *kept, int64_t n, int exact, int threads) {
    each_part(exact ? SPLIT : COMPENSATE, (struct part){.wide = wide, .low = low, .kept = kept}, n, threads);
}

/* Round up or down by the random bits of each element's number; by default, elements count from 0. */
EXPORT void amp_round(float *wide, uint16_t *low, const int32_t *numbers, int64_t n, uint64_t key, int threads) {
    struct part whole = {.wide = wide, .low = low, .numbers = numbers};
    whole.first = (uint32_t)key;
    whole.second = (uint32_t)(key >> 32);
    each_part(numbers ? NUMBERED : STOCHASTIC, whole, n, threads);
}
