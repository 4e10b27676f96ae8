/* Quantising on the CPU: the passes over a tensor's elements. The scales in between are few, and torch computes
 * them. The tensor is an array of shape (batches, rows, columns); what shares a scale is a tile of it. Threads
 * take whole tiles, and counts are integers: no result depends on their number.
 *
 * dtype codes: 0 float32, 2 bfloat16, 3 float16.
 */
#include "common.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define PIECE 4096 /* elements of a row that a loop takes at once: they stay in the first-level cache */
#define PART 256   /* codes that are narrowed at once */
#define HUGE_PAGE ((uintptr_t)1 << 21)
#define NARROW 128 /* tiles up to this width are rounded together, by a factor for each element */
#define STRIP 1024 /* columns that a thread takes at least */

#define MAGNITUDE 0x7fffffffu
#define INFINITE 0x7f800000u

/* A format of elements; the floats are given by their bits. */
struct element {
    uint32_t mantissa_bits;
    uint32_t smallest_normal;
    uint32_t limit; /* a power of two above the largest value */
    int32_t largest_code;
    uint32_t sign_bit; /* its number */
    uint32_t nan_code;
    float max;
};

/* Where random bits come from: the halves of a key, and the distance of neighbours' numbers. */
struct draws {
    uint32_t first, second, stride;
};

/* An array and its tiles. */
struct tiles {
    int64_t batches, rows, columns, height, width;
};

/* How scales follow from largest magnitudes. */
struct scaling {
    int32_t kind; /* 0 float32, 1 a power of two in float32, 2 e8m0, 3 e8m0 rounded up, 4 e4m3 */
    float max;    /* of the element format, and its exponent */
    int32_t emax;
};

typedef void round_loop(const float *x, const float *encode, size_t n, const struct element *to,
                        const struct draws *draws, uint32_t number, void *out, int64_t *counts);

struct quantizing_loops {
    void (*widen)(const uint16_t *from, int is_bf16, float *to, size_t n);
    void (*largest)(const float *x, size_t n, size_t group, uint32_t *best);
    void (*nonfinite)(const float *x, size_t n, int64_t *counts);
    void (*scales)(const float *own, const float *found, size_t n, const struct scaling *to, float outer,
                   float *encode, void *out, int packed);
    void (*spread)(const float *from, size_t n, size_t width, float *to);
    void (*store_pairs)(const uint8_t *codes, size_t n, uint8_t *out);
    round_loop *round[2][2][2]; /* by whether a run of elements shares a scale, is drawn, and stored as codes */
    round_loop *round_bounded[2];
};

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#undef IN
#define IN(name) name##_least
#include "quantize_loops.h"
#undef IN

#ifdef X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define IN(name) name##_avx2
#include "quantize_loops.h"
#undef IN
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#define IN(name) name##_avx512
#include "quantize_loops.h"
#undef IN
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

static const struct quantizing_loops *quantizing_loops(void) {
#ifdef X86
    switch (amp_level()) {
    case 2:
        return &quantizing_avx512;
    case 1:
        return &quantizing_avx2;
    }
#endif
    return &quantizing_least;
}

static int64_t parts(int64_t size, int64_t part) { return (size + part - 1) / part; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* What a thread takes: some columns of the rows of one line of tiles. */
struct unit {
    int64_t top, bottom, left, right; /* rows count through all batches */
    int64_t line;                     /* of tiles */
};

/* The columns of a unit: whole tiles. */
static int64_t strip_of(const struct tiles *t) { return parts(STRIP, t->width) * t->width; }

static int64_t units_of(const struct tiles *t) {
    return t->batches * parts(t->rows, t->height) * parts(t->columns, strip_of(t));
}

static struct unit unit_of(const struct tiles *t, int64_t number) {
    int64_t strip = strip_of(t), strips = parts(t->columns, strip), lines = parts(t->rows, t->height);
    int64_t line = number / strips, batch = line / lines, top = line % lines * t->height;
    struct unit u = {.line = line, .left = number % strips * strip};
    u.right = least(u.left + strip, t->columns);
    u.top = batch * t->rows + top;
    u.bottom = batch * t->rows + least(top + t->height, t->rows);
    return u;
}

/* The elements that a loop takes at once: whole tiles, or a part of one. */
static int64_t piece_of(const struct tiles *t) {
    return t->width < PIECE ? PIECE / t->width * t->width : PIECE;
}

static const float *floats_at(const struct quantizing_loops *loops, const void *data, int dtype, int64_t at,
                              size_t n, float *stage) {
    if (dtype == 0)
        return (const float *)data + at;
    loops->widen((const uint16_t *)data + at, dtype == 2, stage, n);
    return stage;
}

#define FOR_EACH_PIECE(...)                                                                        \
    for (int64_t row = u.top; row < u.bottom; row++)                                               \
        for (int64_t column = u.left, n; column < u.right; column += n) {                          \
            int64_t at = row * tiles->columns + column;                                            \
            n = least(piece, u.right - column);                                                    \
            const float *x = floats_at(loops, data, dtype, at, (size_t)n, stage);                  \
            __VA_ARGS__                                                                            \
        }

/* amax: the largest magnitude of each tile, NaN if it has one, of shape (batches, lines of tiles, tiles of a
 * line). counts: how many elements are inf, and NaN. */
EXPORT void amp_quantize_largest(const void *data, int dtype, const struct tiles *tiles, float *amax,
                                 int64_t *counts, int threads) {
    const struct quantizing_loops *loops = quantizing_loops();
    int64_t units = units_of(tiles), piece = piece_of(tiles), across = parts(tiles->columns, tiles->width);
    int64_t infinite = 0, nan = 0, i;
    (void)threads;
    OMP(parallel for schedule(static) num_threads(threads) if (threads > 1 && amp_may_thread())
            reduction(+ : infinite, nan))
    for (i = 0; i < units; i++) {
        struct unit u = unit_of(tiles, i);
        int64_t first = u.left / tiles->width, last = parts(u.right, tiles->width), found[2] = {0, 0};
        uint32_t *best = (uint32_t *)(void *)(amax + u.line * across), most = 0;
        float stage[PIECE];
        for (int64_t tile = first; tile < last; tile++)
            best[tile] = 0;
        FOR_EACH_PIECE(loops->largest(x, (size_t)n, (size_t)tiles->width, best + column / tiles->width);)
        for (int64_t tile = first; tile < last; tile++)
            most = best[tile] > most ? best[tile] : most;
        if (most >= INFINITE) {
            FOR_EACH_PIECE(loops->nonfinite(x, (size_t)n, found);)
        }
        infinite += found[0];
        nan += found[1];
    }
    counts[0] = infinite;
    counts[1] = nan;
}

/* Scales from the largest magnitudes `found`, and NaN where `own` is inf or NaN: n floats, or bytes of the
 * formats of one byte if `packed`. `outer` is the second scale of e4m3. */
EXPORT void amp_quantize_scales(const float *own, const float *found, int64_t n, const struct scaling *scaling,
                                const float *outer, float *encode, void *out, int packed, int threads) {
    const struct quantizing_loops *loops = quantizing_loops();
    int64_t units = parts(n, PIECE), i;
    (void)threads;
    OMP(parallel for schedule(static) num_threads(threads) if (threads > 1 && amp_may_thread()))
    for (i = 0; i < units; i++) {
        int64_t at = i * PIECE;
        loops->scales(own + at, found + at, (size_t)least(PIECE, n - at), scaling, outer ? *outer : 1.0f,
                      encode + at, (char *)out + at * (packed ? 1 : 4), packed);
    }
}

/* Ask for huge pages where a result lies: the faults of small ones take longer than rounding does. */
static void want_huge_pages(void *out, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t start = ((uintptr_t)out + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    uintptr_t end = ((uintptr_t)out + (uintptr_t)bytes) & ~(HUGE_PAGE - 1);
    if (start < end)
        madvise((void *)start, end - start, MADV_HUGEPAGE); /* refused, it stays as it is */
#else
    (void)out, (void)bytes;
#endif
}

/* Round what amp_quantize_largest measured, multiplied by the tiles' `encode`, or by the one of the tensor if
 * `single`, and count elements that saturated and became 0. `bounded`: each tile's `encode` follows from its own
 * largest magnitude and takes it to the largest value at most. `out` receives floats, if `coded` codes of one
 * byte, or if it is 2 pairs of codes of 4 bits: columns must be even then, and tiles of an even width or 1. With
 * `draws`, rounding is stochastic; the number of an element is the sum of its batch, row and column times
 * numbers[0], [1] and [2]. */
EXPORT void amp_quantize_round(const void *data, int dtype, const struct tiles *tiles, const float *encode,
                               int single, int bounded, const struct element *element,
                               const struct draws *draws, const int64_t *numbers, void *out, int coded,
                               int64_t *counts, int threads) {
    const struct quantizing_loops *loops = quantizing_loops();
    int64_t units = units_of(tiles), piece = piece_of(tiles), across = parts(tiles->columns, tiles->width);
    int64_t saturated = 0, flushed = 0, width = tiles->width, i;
    (void)threads;
    int spread = !single && width > 1 && width <= NARROW, shared = single || (width > 1 && !spread);
    int64_t elements = tiles->batches * tiles->rows * tiles->columns;
    want_huge_pages(out, coded == 2 ? elements / 2 : elements * (coded ? 1 : 4));
    const struct draws none = {0, 0, 0};
    round_loop *any = loops->round[shared][draws != NULL][coded != 0];
    round_loop *finite = shared && bounded && draws == NULL ? loops->round_bounded[coded != 0] : any;
    OMP(parallel for schedule(static) num_threads(threads) if (threads > 1 && amp_may_thread())
            reduction(+ : saturated, flushed))
    for (i = 0; i < units; i++) {
        struct unit u = unit_of(tiles, i);
        int64_t found[2] = {0, 0};
        float stage[PIECE], factors[PIECE + NARROW];
        uint8_t codes[PIECE];
        FOR_EACH_PIECE({
            const float *by = single ? encode : encode + u.line * across + column / width;
            int64_t run = single || !shared ? n : width;
            if (spread) {
                loops->spread(by, (size_t)n, (size_t)width, factors);
                by = factors;
            }
            uint32_t number = 0;
            if (draws != NULL)
                number = (uint32_t)(row / tiles->rows * numbers[0] + row % tiles->rows * numbers[1] +
                                    column * numbers[2]);
            for (int64_t k = 0; k < n; k += run) {
                const float *factor = single ? by : by + k / width;
                round_loop *round = *factor == *factor ? finite : any; /* NaN marks a tile with inf or NaN */
                char *to = coded == 2 ? (char *)codes + k : (char *)out + (at + k) * (coded ? 1 : 4);
                round(x + k, factor, (size_t)least(run, n - k), element, draws ? draws : &none,
                      number + (uint32_t)(k * (draws ? numbers[2] : 0)), to, found);
            }
            if (coded == 2)
                loops->store_pairs(codes, (size_t)n, (uint8_t *)out + at / 2);
        })
        saturated += found[0];
        flushed += found[1];
    }
    counts[0] = saturated;
    counts[1] = flushed;
}
