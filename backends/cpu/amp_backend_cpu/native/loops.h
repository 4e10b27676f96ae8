/* The loops over one chunk. kernels.c includes this file once for each instruction set, with SET, WIDTH (the
 * bytes of a register) and IN(name), which adds the set's suffix. */
#include "vectors.h"

/* Each loop goes through four parts of its chunk at once, `apart` elements from each other. A core has more
 * reads in flight then; along one line of addresses, narrow registers took up to five times as long. */
#define PARTS 4
#define GROUP (PARTS * PAIR)  /* elements that a loop takes at once */
#define PIECE (16 * PAIR)     /* elements of one part that a sum in float32 takes: 16 in each accumulator */
#define BLOCK (PARTS * PIECE) /* elements of a sum in float32 */
#define LEAST 1e-26          /* a block's sum below this may have lost squares that left float32 */
#define MOST 1e38

/* The distance of the parts, in elements of `width` bytes, for loops that also store. It is no multiple of
 * 4 KiB: a load waits for the stores before it that have the same lower 12 bits of the address. */
INLINE size_t IN(distance)(size_t n, size_t width) {
    size_t apart = n / GROUP * PAIR, bytes = apart * width;
    return bytes > 0 && bytes % 4096 == 0 ? apart - 512 / width : apart;
}

INLINE double IN(total)(floats v) {
    double sum = 0.0;
    for (int k = 0; k < LANES; k++)
        sum += (double)LANE(v, k);
    return sum;
}

/* ---- norms ---- */

/* The sum of squares in doubles, of which there are few enough that no finite element leaves them. */
static double IN(careful)(const float *x, size_t n, uint32_t *bad) {
    double sums[16] = {0};
    uint32_t any = 0, infinite = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        any |= bits & 0x7fffffffu;
        infinite |= (bits & EXPONENT) == EXPONENT;
    }
    if (any == 0)
        return 0.0;
    *bad |= infinite;
    for (size_t i = 0; i < n; i++)
        sums[i % 16] += (double)x[i] * (double)x[i];
    for (int k = 1; k < 16; k++)
        sums[0] += sums[k];
    return sums[0];
}

/* Squares are summed in float32, a block at a time: each accumulator takes 16 elements and three additions
 * join the eight, so that a sum is within 20 roundings of the exact one. A sum that is infinite, NaN or so
 * small that squares below the least normal float may be missing in it is done again in doubles. So no
 * element is tested for inf and NaN by itself: none is there where the sum is finite. */
#define STATS(NAME, TYPE, SPLIT, LOAD)                                                                 \
    static NOINLINE double IN(NAME##_again)(const TYPE *x, size_t apart, size_t n, uint32_t *bad) {    \
        float wide[PIECE];                                                                             \
        double sum = 0.0;                                                                              \
        for (size_t part = 0; part < PARTS; part++) {                                                  \
            for (size_t i = 0; i < n; i += PAIR)                                                       \
                IN(store_f32)(wide + i, LOAD(x + part * apart + i), 0);                                \
            sum += IN(careful)(wide, n, bad);                                                          \
        }                                                                                              \
        return sum;                                                                                    \
    }                                                                                                  \
    static double IN(NAME##_block)(const TYPE *x, size_t apart, size_t n, uint32_t *bad) {             \
        floats s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0}, s5 = {0}, s6 = {0}, s7 = {0};         \
        for (size_t i = 0; i < n; i += PAIR) {                                                         \
            pair v = SPLIT(x + i);                                                                     \
            s0 += v.a * v.a;                                                                           \
            s1 += v.b * v.b;                                                                           \
            v = SPLIT(x + i + apart);                                                                  \
            s2 += v.a * v.a;                                                                           \
            s3 += v.b * v.b;                                                                           \
            v = SPLIT(x + i + 2 * apart);                                                              \
            s4 += v.a * v.a;                                                                           \
            s5 += v.b * v.b;                                                                           \
            v = SPLIT(x + i + 3 * apart);                                                              \
            s6 += v.a * v.a;                                                                           \
            s7 += v.b * v.b;                                                                           \
        }                                                                                              \
        double sum = IN(total)(((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)));                     \
        if (!(sum > LEAST && sum < MOST)) {                                                            \
            KEEP_SUBNORMALS();                                                                         \
            sum = IN(NAME##_again)(x, apart, n, bad);                                                  \
            FLUSH_SUBNORMALS();                                                                        \
        }                                                                                              \
        return sum;                                                                                    \
    }                                                                                                  \
    static void IN(NAME)(const void *data, size_t n, double *sum, uint32_t *bad) {                     \
        const TYPE *x = data;                                                                          \
        size_t apart = n / BLOCK * PIECE, end = PARTS * apart, few = (n - end) / GROUP * PAIR;         \
        unsigned mode = fp_mode();                                                                     \
        FLUSH_SUBNORMALS();                                                                            \
        for (size_t i = 0; i < apart; i += PIECE)                                                      \
            *sum += IN(NAME##_block)(x + i, apart, PIECE, bad);                                        \
        if (few > 0)                                                                                   \
            *sum += IN(NAME##_block)(x + end, few, few, bad);                                          \
        end += PARTS * few;                                                                            \
        if (end < n) {                                                                                 \
            TYPE last[GROUP] = {0};                                                                    \
            memcpy(last, x + end, (n - end) * sizeof *x);                                              \
            *sum += IN(NAME##_block)(last, PAIR, PAIR, bad);                                           \
        }                                                                                              \
        set_fp_mode(mode);                                                                             \
    }

STATS(stats_f32, float, IN(load_f32), IN(load_f32))
STATS(stats_bf16, uint16_t, IN(split_bf16), IN(load_bf16))
STATS(stats_f16, uint16_t, IN(load_f16), IN(load_f16))

#define WIDE (sizeof(doubles) / 8) /* doubles in a vector */

static void IN(stats_f64)(const void *data, size_t n, double *sum, uint32_t *bad) {
    const double *x = data;
    doubles s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    double total = 0.0;
    size_t i = 0;
    for (; i + 4 * WIDE <= n; i += 4 * WIDE) {
        doubles a, b, c, d; /* each loaded by itself: compilers copy an array through memory */
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, x + i + WIDE, sizeof b);
        memcpy(&c, x + i + 2 * WIDE, sizeof c);
        memcpy(&d, x + i + 3 * WIDE, sizeof d);
        s0 += a * a;
        s1 += b * b;
        s2 += c * c;
        s3 += d * d;
    }
    for (; i < n; i++)
        total += x[i] * x[i];
    s0 = (s0 + s1) + (s2 + s3);
    for (size_t k = 0; k < WIDE; k++)
        total += LANE(s0, k);
    *sum += total;
    if (!(total < INFINITY))
        for (i = 0; i < n; i++)
            *bad |= !isfinite(x[i]);
}

/* ---- products in place ----
 *
 * What was inf or NaN before is so afterwards, whatever the factor: only products are tested. A number times
 * zero is a zero, but inf and NaN make a NaN, which stays in a sum. */

INLINE pair IN(product_f32)(float *x, float factor) {
    pair v = IN(load_f32)(x);
    v.a *= factor;
    v.b *= factor;
    IN(store_f32)(x, v, 0);
    return v;
}

static void IN(multiply_f32)(void *data, size_t n, float factor, uint32_t *bad) {
    float *x = data;
    floats z0 = {0}, z1 = {0}, z2 = {0}, z3 = {0}; /* with two, each addition waits for the one before */
    double zeros = 0.0;
    size_t i = 0, apart = IN(distance)(n, sizeof *x);
    for (; i < apart; i += PAIR) {
        for (size_t part = 0; part < PARTS; part += 2) {
            pair v = IN(product_f32)(x + part * apart + i, factor);
            pair w = IN(product_f32)(x + (part + 1) * apart + i, factor);
            z0 += v.a * 0.0f;
            z1 += v.b * 0.0f;
            z2 += w.a * 0.0f;
            z3 += w.b * 0.0f;
        }
    }
    for (i = PARTS * apart; i + PAIR <= n; i += PAIR) {
        pair v = IN(product_f32)(x + i, factor);
        z0 += v.a * 0.0f;
        z1 += v.b * 0.0f;
    }
    for (; i < n; i++) {
        x[i] *= factor;
        zeros += (double)(x[i] * 0.0f);
    }
    zeros += IN(total)((z0 + z1) + (z2 + z3));
    *bad |= zeros != zeros;
}

static void IN(multiply_f64)(void *data, size_t n, float factor, uint32_t *bad) {
    double *x = data, by = factor, zeros = 0.0;
    doubles z0 = {0}, z1 = {0}, z2 = {0}, z3 = {0};
    size_t i = 0;
    for (; i + 4 * WIDE <= n; i += 4 * WIDE) {
        doubles a, b, c, d;
        memcpy(&a, x + i, sizeof a);
        memcpy(&b, x + i + WIDE, sizeof b);
        memcpy(&c, x + i + 2 * WIDE, sizeof c);
        memcpy(&d, x + i + 3 * WIDE, sizeof d);
        a *= by;
        b *= by;
        c *= by;
        d *= by;
        z0 += a * 0.0;
        z1 += b * 0.0;
        z2 += c * 0.0;
        z3 += d * 0.0;
        memcpy(x + i, &a, sizeof a);
        memcpy(x + i + WIDE, &b, sizeof b);
        memcpy(x + i + 2 * WIDE, &c, sizeof c);
        memcpy(x + i + 3 * WIDE, &d, sizeof d);
    }
    z0 = (z0 + z1) + (z2 + z3);
    for (; i < n; i++) {
        x[i] *= by;
        zeros += x[i] * 0.0;
    }
    for (size_t k = 0; k < WIDE; k++)
        zeros += LANE(z0, k);
    *bad |= zeros != zeros;
}

#if SET == SCALAR
#define MULTIPLY(NAME, LOAD, JOIN, STORE_PAIR, INFINITE)                                               \
    static void IN(NAME)(void *data, size_t n, float factor, uint32_t *bad) {                          \
        uint16_t *x = data;                                                                            \
        for (size_t i = 0; i < n; i++) {                                                               \
            uint16_t two[2] = {x[i], 0};                                                               \
            pair v = LOAD(two);                                                                        \
            v.a *= factor;                                                                             \
            STORE_PAIR(two, v, 0);                                                                     \
            x[i] = two[0];                                                                             \
            *bad |= (two[0] & INFINITE) == INFINITE;                                                   \
        }                                                                                              \
    }
#else
#define MULTIPLY(NAME, LOAD, JOIN, STORE_PAIR, INFINITE)                                               \
    /* Return the magnitudes of the products, the bits of which are in the order of their values. */    \
    INLINE halves IN(NAME##_pair)(uint16_t *x, float factor) {                                         \
        pair v = LOAD(x);                                                                              \
        v.a *= factor;                                                                                 \
        v.b *= factor;                                                                                 \
        halves after = JOIN(v);                                                                        \
        memcpy(x, &after, sizeof after);                                                               \
        return after & 0x7fff;                                                                         \
    }                                                                                                  \
    static void IN(NAME)(void *data, size_t n, float factor, uint32_t *bad) {                          \
        uint16_t *x = data;                                                                            \
        halves largest = {0};                                                                          \
        size_t i = 0, apart = IN(distance)(n, sizeof *x);                                              \
        for (; i < apart; i += PAIR)                                                                   \
            for (size_t part = 0; part < PARTS; part++)                                                \
                largest = IN(larger)(largest, IN(NAME##_pair)(x + part * apart + i, factor));          \
        for (i = PARTS * apart; i + PAIR <= n; i += PAIR)                                              \
            largest = IN(larger)(largest, IN(NAME##_pair)(x + i, factor));                             \
        for (int k = 0; k < PAIR; k++)                                                                 \
            *bad |= largest[k] >= INFINITE;                                                            \
        if (i < n) {                                                                                   \
            uint16_t rest[PAIR] = {0};                                                                 \
            memcpy(rest, x + i, (n - i) * sizeof *x);                                                  \
            IN(NAME##_pair)(rest, factor);                                                             \
            memcpy(x + i, rest, (n - i) * sizeof *x);                                                  \
            for (; i < n; i++)                                                                         \
                *bad |= (x[i] & INFINITE) == INFINITE;                                                 \
        }                                                                                              \
    }
#endif

MULTIPLY(multiply_bf16, IN(split_bf16), IN(join_bf16), IN(store_bf16), 0x7f80)
MULTIPLY(multiply_f16, IN(load_f16), IN(join_f16), IN(store_f16), 0x7c00)

/* ---- casts ---- */

#define CAST(NAME, FROM, LOAD, TO, STORE_PAIR)                                                         \
    INLINE void IN(NAME##_body)(const FROM *from, TO *to, size_t n, int stream) {                      \
        size_t i = 0, apart = IN(distance)(n, sizeof(uint16_t));                                       \
        for (; i < apart; i += PAIR)                                                                   \
            for (size_t part = 0; part < PARTS; part++)                                                \
                STORE_PAIR(to + part * apart + i, LOAD(from + part * apart + i), stream);              \
        for (i = PARTS * apart; i + PAIR <= n; i += PAIR)                                              \
            STORE_PAIR(to + i, LOAD(from + i), stream);                                                \
        if (i < n) {                                                                                   \
            FROM rest[PAIR] = {0};                                                                     \
            TO last[PAIR];                                                                             \
            memcpy(rest, from + i, (n - i) * sizeof *from);                                            \
            STORE_PAIR(last, LOAD(rest), 0);                                                           \
            memcpy(to + i, last, (n - i) * sizeof *to);                                                \
        }                                                                                              \
        if (stream)                                                                                    \
            STREAM_END();                                                                              \
    }                                                                                                  \
    static void IN(NAME)(const void *from, void *to, size_t n, int stream) {                           \
        if (stream)                                                                                    \
            IN(NAME##_body)(from, to, n, 1);                                                           \
        else                                                                                           \
            IN(NAME##_body)(from, to, n, 0);                                                           \
    }

CAST(cast_f32_bf16, float, IN(load_f32), uint16_t, IN(store_bf16))
CAST(cast_f32_f16, float, IN(load_f32), uint16_t, IN(store_f16))
CAST(cast_bf16_f32, uint16_t, IN(load_bf16), float, IN(store_f32))
CAST(cast_bf16_f16, uint16_t, IN(load_bf16), uint16_t, IN(store_f16))
CAST(cast_f16_f32, uint16_t, IN(load_f16), float, IN(store_f32))
CAST(cast_f16_bf16, uint16_t, IN(load_f16), uint16_t, IN(store_bf16))

/* Casts from and to doubles are plain loops, which compilers turn into vectors of the right width. */

static void IN(cast_f64_f32)(const void *source, void *target, size_t n, int stream) {
    const double *from = source;
    float *to = target;
    (void)stream;
    for (size_t i = 0; i < n; i++)
        to[i] = (float)from[i];
}

static void IN(cast_f32_f64)(const void *source, void *target, size_t n, int stream) {
    const float *from = source;
    double *to = target;
    (void)stream;
    for (size_t i = 0; i < n; i++)
        to[i] = (double)from[i];
}

#define STAGE 512 /* elements that wait as floats between two casts */

/* Rounded to odd: a float with spare bits that says whether anything was cut off, so that the second rounding
 * gives what a single one would. */
INLINE void IN(round_to_odd)(const double *from, float *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float nearest = (float)from[i];
        double back = (double)nearest;
        uint32_t bits;
        memcpy(&bits, &nearest, sizeof bits);
        bits -= fabs(back) > fabs(from[i]);
        bits |= back != from[i];
        memcpy(to + i, &bits, sizeof bits);
    }
}

#define CAST_FROM_F64(SHORT)                                                                           \
    static void IN(cast_f64_##SHORT)(const void *source, void *target, size_t n, int stream) {         \
        float stage[STAGE];                                                                            \
        (void)stream;                                                                                  \
        for (size_t i = 0; i < n; i += STAGE) {                                                        \
            size_t m = n - i < STAGE ? n - i : STAGE;                                                  \
            IN(round_to_odd)((const double *)source + i, stage, m);                                    \
            IN(cast_f32_##SHORT)(stage, (uint16_t *)target + i, m, 0);                                 \
        }                                                                                              \
    }                                                                                                  \
    static void IN(cast_##SHORT##_f64)(const void *source, void *target, size_t n, int stream) {       \
        float stage[STAGE];                                                                            \
        (void)stream;                                                                                  \
        for (size_t i = 0; i < n; i += STAGE) {                                                        \
            size_t m = n - i < STAGE ? n - i : STAGE;                                                  \
            IN(cast_##SHORT##_f32)((const uint16_t *)source + i, stage, m, 0);                         \
            IN(cast_f32_f64)(stage, (double *)target + i, m, 0);                                       \
        }                                                                                              \
    }

CAST_FROM_F64(bf16)
CAST_FROM_F64(f16)

/* ---- sums ---- */

#define ADD(NAME, LOAD)                                                                                \
    static void IN(NAME)(const void *source, float *total, size_t n) {                                 \
        const uint16_t *from = source;                                                                 \
        size_t i = 0;                                                                                  \
        for (; i + PAIR <= n; i += PAIR) {                                                             \
            pair v = LOAD(from + i), sum = IN(load_f32)(total + i);                                    \
            sum.a += v.a;                                                                              \
            sum.b += v.b;                                                                              \
            IN(store_f32)(total + i, sum, 0);                                                          \
        }                                                                                              \
        if (i < n) {                                                                                   \
            uint16_t rest[PAIR] = {0};                                                                 \
            float wide[PAIR];                                                                          \
            memcpy(rest, from + i, (n - i) * sizeof *from);                                            \
            IN(store_f32)(wide, LOAD(rest), 0);                                                        \
            for (size_t k = 0; i + k < n; k++)                                                         \
                total[i + k] += wide[k];                                                               \
        }                                                                                              \
    }

ADD(add_bf16, IN(load_bf16))
ADD(add_f16, IN(load_f16))

static const struct loops IN(loops) = {
    NAME_OF_SET,
    {IN(stats_f32), IN(stats_f64), IN(stats_bf16), IN(stats_f16)},
    {IN(multiply_f32), IN(multiply_f64), IN(multiply_bf16), IN(multiply_f16)},
    {
        {NULL, IN(cast_f32_f64), IN(cast_f32_bf16), IN(cast_f32_f16)},
        {IN(cast_f64_f32), NULL, IN(cast_f64_bf16), IN(cast_f64_f16)},
        {IN(cast_bf16_f32), IN(cast_bf16_f64), NULL, IN(cast_bf16_f16)},
        {IN(cast_f16_f32), IN(cast_f16_f64), IN(cast_f16_bf16), NULL},
    },
    {NULL, NULL, IN(add_bf16), IN(add_f16)},
};

#undef floats
#undef words
#undef halves
#undef doubles
#undef pair
#undef LANES
#undef MASK
#undef LANE
#undef PAIR
#undef STREAM
#undef STORE
#undef PARTS
#undef GROUP
#undef PIECE
#undef BLOCK
#undef LEAST
#undef MOST
#undef STATS
#undef WIDE
#undef MULTIPLY
#undef CAST
#undef CAST_FROM_F64
#undef STAGE
#undef ADD
