/* The loops over one chunk, compiled once for each instruction set: kernels.c includes this file with
 * IN(name) adding the set's suffix. */

static inline floats IN(widen_bf16)(halves h) { return (floats)(__builtin_convertvector(h, words) << 16); }

/* Round to nearest even; a NaN stays a NaN even where all its set bits would be cut off. */
static inline halves IN(narrow_bf16)(floats v) {
    words bits = (words)v;
    words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    words nan = (words)((bits & 0x7fffffffu) > EXPONENT);
    return __builtin_convertvector((nan & ((bits >> 16) | 0x40u)) | (~nan & rounded), halves);
}

#if HALVES_AT_ONCE == 16
static inline floats IN(widen_f16)(halves h) { return (floats)_mm512_cvtph_ps((__m256i)h); }

static inline halves IN(narrow_f16)(floats v) {
    return (halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
}
#elif HALVES_AT_ONCE == 8
static inline floats IN(widen_f16)(halves h) {
    __m128i part[2];
    __m256 made[2];
    floats v;
    memcpy(part, &h, sizeof part);
    made[0] = _mm256_cvtph_ps(part[0]);
    made[1] = _mm256_cvtph_ps(part[1]);
    memcpy(&v, made, sizeof v);
    return v;
}

static inline halves IN(narrow_f16)(floats v) {
    __m256 part[2];
    __m128i made[2];
    halves h;
    memcpy(part, &v, sizeof part);
    made[0] = _mm256_cvtps_ph(part[0], _MM_FROUND_TO_NEAREST_INT);
    made[1] = _mm256_cvtps_ph(part[1], _MM_FROUND_TO_NEAREST_INT);
    memcpy(&h, made, sizeof h);
    return h;
}
#else
/* Exponent and mantissa are shifted into place and the bias is set; subnormals are normalised by a
 * subtraction, whose operands are normal: a product with subnormals takes a hundred times as long. */
static inline floats IN(widen_f16)(halves h) {
    words bits = __builtin_convertvector(h, words);
    words magnitude = (bits & 0x7fffu) << 13;
    words normal = magnitude + 0x38000000u;
    words special = (words)(magnitude >= 0x0f800000u);
    words small = (words)(magnitude < 0x00800000u);
    words normalised = (words)((floats)(normal + 0x00800000u) - 0x1p-14f);
    return (floats)(((bits & 0x8000u) << 16) | (small & normalised) |
                    (~small & (normal + (special & 0x38000000u))));
}

/* Round to nearest even, subnormals by an addition that aligns their last bit with that of 0.5. */
static inline halves IN(narrow_f16)(floats v) {
    words bits = (words)v, magnitude = bits & 0x7fffffffu;
    words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    words subnormal = (words)((floats)magnitude + 0.5f) - 0x3f000000u;
    words small = (words)(magnitude < 0x38800000u);
    words large = (words)(magnitude >= 0x47800000u);
    words special = 0x7c00u | ((words)(magnitude > EXPONENT) & 0x200u);
    words made = (small & subnormal) | (~small & ~large & normal) | (large & special);
    return __builtin_convertvector(made | ((bits >> 16) & 0x8000u), halves);
}
#endif

static inline floats IN(same)(floats v) { return v; }

static inline floats IN(narrow_f64)(doubles v) { return __builtin_convertvector(v, floats); }

static inline doubles IN(widen_f64)(floats v) { return __builtin_convertvector(v, doubles); }

/* Each number times zero is a zero, but inf and NaN make a NaN, which stays in the sum: one instruction. */
static inline uint32_t IN(any_nan)(floats zeros) {
    uint32_t found = 0;
    for (int k = 0; k < WIDTH; k++)
        found |= zeros[k] != zeros[k];
    return found;
}

#define MEASURE(NAME, TYPE, VECTOR, WIDEN)                                                         \
    static void NAME(const void *data, size_t n, double *sum, uint32_t *bad) {                     \
        const TYPE *x = data;                                                                      \
        doubles even = {0}, odd = {0};                                                             \
        floats zeros[2] = {{0}, {0}};                                                              \
        size_t i = 0;                                                                              \
        for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {                                               \
            VECTOR raw[2];                                                                         \
            for (size_t k = 0; k < sizeof raw; k += 64)                                            \
                __builtin_prefetch((const char *)(x + i) + AHEAD + k, 0, 2);                             \
            memcpy(raw, x + i, sizeof raw);                                                        \
            floats a = WIDEN(raw[0]), b = WIDEN(raw[1]);                                           \
            zeros[0] += a * 0.0f;                                                                  \
            zeros[1] += b * 0.0f;                                                                  \
            doubles wide = __builtin_convertvector(a, doubles);                                    \
            even += wide * wide;                                                                   \
            wide = __builtin_convertvector(b, doubles);                                            \
            odd += wide * wide;                                                                    \
        }                                                                                          \
        for (; i < n; i += WIDTH) {                                                                \
            VECTOR raw = {0};                                                                      \
            memcpy(&raw, x + i, (n - i < WIDTH ? n - i : WIDTH) * sizeof *x);                      \
            floats v = WIDEN(raw);                                                                 \
            doubles wide = __builtin_convertvector(v, doubles);                                    \
            zeros[0] += v * 0.0f;                                                                  \
            even += wide * wide;                                                                   \
        }                                                                                          \
        even += odd;                                                                               \
        for (int k = 0; k < WIDTH; k++)                                                            \
            *sum += even[k];                                                                       \
        *bad |= IN(any_nan)(zeros[0] + zeros[1]);                                                  \
    }

MEASURE(IN(measure_f32), float, floats, IN(same))
MEASURE(IN(measure_bf16_wide), uint16_t, halves, IN(widen_bf16))
MEASURE(IN(measure_f16_wide), uint16_t, halves, IN(widen_f16))

/* The square of a half is exact in a float unless it leaves its range, so blocks are summed in floats, three
 * times as fast as in doubles, and summed again in doubles where some square was lost: the sum is infinite,
 * or so small that squares below the least float would be missed in it. */
#define MEASURE_HALVES(NAME, WIDE, WIDEN, INFINITE)                                                \
    static void NAME(const void *data, size_t n, double *sum, uint32_t *bad) {                     \
        const uint16_t *x = data;                                                                  \
        for (size_t start = 0; start < n; start += BLOCK) {                                        \
            size_t size = n - start < BLOCK ? n - start : BLOCK, i = 0;                            \
            floats even = {0}, odd = {0};                                                          \
            halves seen = {0};                                                                     \
            for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {                                        \
                halves raw[2];                                                                     \
                __builtin_prefetch((const char *)(x + start + i) + AHEAD, 0, 2);                         \
                memcpy(raw, x + start + i, sizeof raw);                                            \
                floats a = WIDEN(raw[0]), b = WIDEN(raw[1]);                                       \
                seen |= (halves)((raw[0] & INFINITE) == INFINITE);                                 \
                seen |= (halves)((raw[1] & INFINITE) == INFINITE);                                 \
                even += a * a;                                                                     \
                odd += b * b;                                                                      \
            }                                                                                      \
            double block = 0.0;                                                                    \
            uint32_t found = 0;                                                                    \
            for (int k = 0; k < WIDTH; k++) {                                                      \
                block += (double)even[k] + (double)odd[k];                                         \
                found |= seen[k];                                                                  \
            }                                                                                      \
            if (found || !(block > 1e-28 && block < 1e38)) {                                       \
                i = 0;                                                                             \
                block = 0.0;                                                                       \
            }                                                                                      \
            *sum += block;                                                                         \
            if (i < size && IN(any_bits)(x + start + i, size - i))                                 \
                WIDE(x + start + i, size - i, sum, bad);                                           \
        }                                                                                          \
    }

static inline int IN(any_bits)(const uint16_t *x, size_t n) {
    uint16_t bits = 0;
    for (size_t i = 0; i < n; i++)
        bits |= x[i];
    return (bits & 0x7fff) != 0;
}

MEASURE_HALVES(IN(measure_bf16), IN(measure_bf16_wide), IN(widen_bf16), 0x7f80)
MEASURE_HALVES(IN(measure_f16), IN(measure_f16_wide), IN(widen_f16), 0x7c00)

static void IN(measure_f64)(const void *data, size_t n, double *sum, uint32_t *bad) {
    const double *x = data;
    double sums[WIDTH] = {0};
    for (size_t i = 0; i < n; i++) {
        *bad |= !isfinite(x[i]);
        sums[i % WIDTH] += x[i] * x[i];
    }
    for (int k = 0; k < WIDTH; k++)
        *sum += sums[k];
}

/* What was inf or NaN before the multiplication is so afterwards, whatever the factor. */
#define SCALE(NAME, TYPE, VECTOR, WIDEN, NARROW)                                                   \
    static void NAME(void *data, size_t n, float factor, uint32_t *bad) {                          \
        TYPE *x = data;                                                                            \
        floats zeros = {0};                                                                        \
        size_t i = 0;                                                                              \
        for (; i + WIDTH <= n; i += WIDTH) {                                                       \
            VECTOR raw;                                                                            \
            __builtin_prefetch((const char *)(x + i) + AHEAD, 0, 2);                                     \
            memcpy(&raw, x + i, sizeof raw);                                                       \
            VECTOR after = NARROW(WIDEN(raw) * factor);                                            \
            zeros += WIDEN(after) * 0.0f;                                                          \
            memcpy(x + i, &after, sizeof after);                                                   \
        }                                                                                          \
        if (i < n) {                                                                               \
            VECTOR raw = {0};                                                                      \
            memcpy(&raw, x + i, (n - i) * sizeof *x);                                              \
            VECTOR after = NARROW(WIDEN(raw) * factor);                                            \
            memcpy(x + i, &after, (n - i) * sizeof *x);                                            \
            raw = (VECTOR){0}; /* the rest of the buffer is not of the tensor */                   \
            memcpy(&raw, x + i, (n - i) * sizeof *x);                                              \
            zeros += WIDEN(raw) * 0.0f;                                                            \
        }                                                                                          \
        *bad |= IN(any_nan)(zeros);                                                                \
    }

SCALE(IN(scale_f32), float, floats, IN(same), IN(same))
SCALE(IN(scale_bf16), uint16_t, halves, IN(widen_bf16), IN(narrow_bf16))
SCALE(IN(scale_f16), uint16_t, halves, IN(widen_f16), IN(narrow_f16))

static void IN(scale_f64)(void *data, size_t n, float factor, uint32_t *bad) {
    double *x = data;
    uint32_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        double after = x[i] * (double)factor;
        seen |= !isfinite(x[i]) | !isfinite(after);
        x[i] = after;
    }
    *bad |= seen;
}

/* `stream`: the results go past the caches, so that the lines they overwrite are not read first. */
#define CAST(NAME, FROM, VECTOR, WIDEN, TO, RESULT, NARROW)                                        \
    static void NAME(const void *source, void *target, size_t n, int stream) {                     \
        const FROM *from = source;                                                                 \
        TO *to = target;                                                                           \
        size_t i = 0;                                                                              \
        for (; i + WIDTH <= n; i += WIDTH) {                                                       \
            VECTOR raw;                                                                            \
            __builtin_prefetch((const char *)(from + i) + AHEAD, 0, 2);                                  \
            memcpy(&raw, from + i, sizeof raw);                                                    \
            RESULT made = NARROW(WIDEN(raw));                                                      \
            if (stream)                                                                            \
                STREAM(to + i, made);                                                              \
            else                                                                                   \
                memcpy(to + i, &made, sizeof made);                                                \
        }                                                                                          \
        if (i < n) {                                                                               \
            VECTOR raw = {0};                                                                      \
            memcpy(&raw, from + i, (n - i) * sizeof *from);                                        \
            RESULT made = NARROW(WIDEN(raw));                                                      \
            memcpy(to + i, &made, (n - i) * sizeof *to);                                           \
        }                                                                                          \
        STREAM_END();                                                                              \
    }

#define CASTS_FROM(SHORT, FROM, VECTOR, WIDEN)                                                     \
    CAST(IN(cast_##SHORT##_f32), FROM, VECTOR, WIDEN, float, floats, IN(same))                     \
    CAST(IN(cast_##SHORT##_f64), FROM, VECTOR, WIDEN, double, doubles, IN(widen_f64))              \
    CAST(IN(cast_##SHORT##_bf16), FROM, VECTOR, WIDEN, uint16_t, halves, IN(narrow_bf16))          \
    CAST(IN(cast_##SHORT##_f16), FROM, VECTOR, WIDEN, uint16_t, halves, IN(narrow_f16))

CASTS_FROM(f32, float, floats, IN(same))
CASTS_FROM(f64, double, doubles, IN(narrow_f64))
CASTS_FROM(bf16, uint16_t, halves, IN(widen_bf16))
CASTS_FROM(f16, uint16_t, halves, IN(widen_f16))

#define ADD(NAME, WIDEN)                                                                           \
    static void NAME(const void *source, float *total, size_t n) {                                 \
        const uint16_t *from = source;                                                             \
        size_t i = 0;                                                                              \
        for (; i + WIDTH <= n; i += WIDTH) {                                                       \
            halves raw;                                                                            \
            floats sum;                                                                            \
            __builtin_prefetch((const char *)(from + i) + AHEAD, 0, 2);                                  \
            __builtin_prefetch((const char *)(total + i) + AHEAD, 1, 2);                              \
            memcpy(&raw, from + i, sizeof raw);                                                    \
            memcpy(&sum, total + i, sizeof sum);                                                   \
            sum += WIDEN(raw);                                                                     \
            memcpy(total + i, &sum, sizeof sum);                                                   \
        }                                                                                          \
        if (i < n) {                                                                               \
            halves raw = {0};                                                                      \
            floats sum = {0};                                                                      \
            memcpy(&raw, from + i, (n - i) * sizeof *from);                                        \
            memcpy(&sum, total + i, (n - i) * sizeof *total);                                      \
            sum += WIDEN(raw);                                                                     \
            memcpy(total + i, &sum, (n - i) * sizeof *total);                                      \
        }                                                                                          \
    }

ADD(IN(add_bf16), IN(widen_bf16))
ADD(IN(add_f16), IN(widen_f16))

static const struct loops IN(loops) = {
    {IN(measure_f32), IN(measure_f64), IN(measure_bf16), IN(measure_f16)},
    {IN(scale_f32), IN(scale_f64), IN(scale_bf16), IN(scale_f16)},
    {
        {IN(cast_f32_f32), IN(cast_f32_f64), IN(cast_f32_bf16), IN(cast_f32_f16)},
        {IN(cast_f64_f32), IN(cast_f64_f64), IN(cast_f64_bf16), IN(cast_f64_f16)},
        {IN(cast_bf16_f32), IN(cast_bf16_f64), IN(cast_bf16_bf16), IN(cast_bf16_f16)},
        {IN(cast_f16_f32), IN(cast_f16_f64), IN(cast_f16_bf16), IN(cast_f16_f16)},
    },
    {NULL, NULL, IN(add_bf16), IN(add_f16)},
};

#undef MEASURE
#undef SCALE
#undef CAST
#undef CASTS_FROM
#undef ADD
