/* The CPU's read, scale and cast kernels: plain C over raw pointers, so that no version of torch or
 * Python is bound to them. Work is cut into chunks of fixed size, each reduced by itself and in order,
 * so that no result depends on the number of threads.
 *
 * dtype codes: 0 float32, 1 float64, 2 bfloat16, 3 float16.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The loops are compiled for several instruction sets and one is chosen when the library is loaded. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define MULTIARCH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MULTIARCH
#endif

#define CHUNK 32768 /* elements: two or more chunks of a large weight stay in the second-level cache */
#define LANES 16    /* independent sums, so that the compiler may use vectors without reordering */

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float widen_bf16(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* Exponent and mantissa are shifted into place; the product with 2^112 sets the bias and normalises
 * subnormals; an exponent of all ones stays one. */
static inline float widen_f16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t finite = to_bits(from_bits(magnitude) * 0x1p112f);
    uint32_t special = magnitude | 0x7f800000u;
    return from_bits(sign | (magnitude >= 0x0f800000u ? special : finite));
}

/* Round to nearest even; a NaN stays a NaN even where all its set bits would be cut off. */
static inline uint16_t narrow_bf16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline uint32_t is_bad(float value) { return (to_bits(value) & 0x7f800000u) == 0x7f800000u; }

#define MEASURE(NAME, TYPE, WIDEN)                                                                 \
    MULTIARCH static void NAME(const TYPE *restrict x, size_t n, double *sum, uint32_t *bad) {     \
        double sums[LANES] = {0};                                                                  \
        uint32_t bads[LANES] = {0};                                                                \
        size_t i = 0;                                                                              \
        for (; i + LANES <= n; i += LANES)                                                         \
            for (int k = 0; k < LANES; k++) {                                                      \
                float v = WIDEN(x[i + k]);                                                         \
                bads[k] |= is_bad(v);                                                              \
                sums[k] += (double)v * (double)v;                                                  \
            }                                                                                      \
        for (int k = 0; i < n; i++, k++) {                                                         \
            float v = WIDEN(x[i]);                                                                 \
            bads[k] |= is_bad(v);                                                                  \
            sums[k] += (double)v * (double)v;                                                      \
        }                                                                                          \
        for (int k = 0; k < LANES; k++) {                                                          \
            *sum += sums[k];                                                                       \
            *bad |= bads[k];                                                                       \
        }                                                                                          \
    }

#define SAME(v) (v)
MEASURE(measure_f32, float, SAME)
MEASURE(measure_bf16, uint16_t, widen_bf16)
MEASURE(measure_f16, uint16_t, widen_f16)

MULTIARCH static void measure_f64(const double *restrict x, size_t n, double *sum, uint32_t *bad) {
    double sums[LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, &x[i], 8);
        *bad |= (bits & 0x7ff0000000000000u) == 0x7ff0000000000000u;
        sums[i % LANES] += x[i] * x[i];
    }
    for (int k = 0; k < LANES; k++)
        *sum += sums[k];
}

MULTIARCH static void scale_f32(float *restrict x, size_t n, float factor, uint32_t *bad) {
    uint32_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        float before = x[i], after = before * factor;
        seen |= is_bad(before) | is_bad(after);
        x[i] = after;
    }
    *bad |= seen;
}

MULTIARCH static void scale_bf16(uint16_t *restrict x, size_t n, float factor, uint32_t *bad) {
    uint32_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        float before = widen_bf16(x[i]);
        uint16_t after = narrow_bf16(before * factor);
        seen |= is_bad(before) | is_bad(widen_bf16(after));
        x[i] = after;
    }
    *bad |= seen;
}

MULTIARCH static void scale_f64(double *restrict x, size_t n, float factor, uint32_t *bad) {
    uint32_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        double after = x[i] * (double)factor;
        seen |= !isfinite(x[i]) | !isfinite(after);
        x[i] = after;
    }
    *bad |= seen;
}

MULTIARCH static void cast_f32_bf16(const float *restrict from, uint16_t *restrict to, size_t n) {
    for (size_t i = 0; i < n; i++)
        to[i] = narrow_bf16(from[i]);
}

MULTIARCH static void cast_bf16_f32(const uint16_t *restrict from, float *restrict to, size_t n) {
    for (size_t i = 0; i < n; i++)
        to[i] = widen_bf16(from[i]);
}

MULTIARCH static void cast_f16_f32(const uint16_t *restrict from, float *restrict to, size_t n) {
    for (size_t i = 0; i < n; i++)
        to[i] = widen_f16(from[i]);
}

/* chunks[i] is the number of the first chunk of tensor i; chunks[count] the number of all. */
static size_t *first_chunks(size_t count, const int64_t *sizes) {
    size_t *chunks = malloc((count + 1) * sizeof *chunks);
    if (chunks == NULL)
        return NULL;
    chunks[0] = 0;
    for (size_t i = 0; i < count; i++)
        chunks[i + 1] = chunks[i] + ((size_t)sizes[i] + CHUNK - 1) / CHUNK;
    return chunks;
}

static size_t tensor_of(const size_t *chunks, size_t count, size_t chunk) {
    size_t low = 0, high = count;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (chunks[middle] <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}

#define FOR_EACH_CHUNK(BODY)                                                                       \
    _Pragma("omp parallel for schedule(static) num_threads(threads)")                              \
    for (int64_t c = 0; c < (int64_t)chunks[count]; c++) {                                         \
        size_t t = tensor_of(chunks, count, (size_t)c);                                            \
        size_t start = ((size_t)c - chunks[t]) * CHUNK;                                            \
        size_t n = (size_t)sizes[t] - start < CHUNK ? (size_t)sizes[t] - start : CHUNK;            \
        BODY                                                                                       \
    }

/* sums[i]: sum of squares of tensor i; bad[i]: 1 if it holds an inf or a NaN, else 0; only read. */
int amp_measure(int64_t count_, const void *const *data, const int64_t *sizes, const int32_t *dtypes,
                double *sums, float *bad, int threads) {
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes);
    double *part = chunks ? calloc(chunks[count] + 1, sizeof *part) : NULL;
    uint32_t *flag = chunks ? calloc(chunks[count] + 1, sizeof *flag) : NULL;
    int ok = part != NULL && flag != NULL;
    if (ok) {
        FOR_EACH_CHUNK(switch (dtypes[t]) {
            case 0: measure_f32((const float *)data[t] + start, n, &part[c], &flag[c]); break;
            case 1: measure_f64((const double *)data[t] + start, n, &part[c], &flag[c]); break;
            case 2: measure_bf16((const uint16_t *)data[t] + start, n, &part[c], &flag[c]); break;
            default: measure_f16((const uint16_t *)data[t] + start, n, &part[c], &flag[c]);
        })
        for (size_t t = 0; t < count; t++) {
            sums[t] = 0.0;
            bad[t] = 0.0f;
            for (size_t c = chunks[t]; c < chunks[t + 1]; c++) {
                sums[t] += part[c];
                if (flag[c])
                    bad[t] = 1.0f;
            }
        }
    }
    free(part);
    free(flag);
    free(chunks);
    return ok ? 0 : -1;
}

/* Multiply in place by *factor; *found becomes 1 if an element is not finite before or after. */
int amp_scale(int64_t count_, void *const *data, const int64_t *sizes, const int32_t *dtypes,
              const float *factor, float *found, int threads) {
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes);
    uint32_t any = 0;
    float by = *factor;
    if (chunks == NULL)
        return -1;
    FOR_EACH_CHUNK(uint32_t bad = 0; switch (dtypes[t]) {
        case 0: scale_f32((float *)data[t] + start, n, by, &bad); break;
        case 1: scale_f64((double *)data[t] + start, n, by, &bad); break;
        default: scale_bf16((uint16_t *)data[t] + start, n, by, &bad);
    } if (bad) {
        _Pragma("omp atomic write")
        any = 1;
    })
    if (any && found != NULL)
        *found = 1.0f;
    free(chunks);
    return 0;
}

/* kind: 0 float32 to bfloat16, 1 bfloat16 to float32, 2 float16 to float32. */
int amp_cast(int64_t count_, const void *const *from, void *const *to, const int64_t *sizes,
             const int32_t *kinds, int threads) {
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes);
    if (chunks == NULL)
        return -1;
    FOR_EACH_CHUNK(switch (kinds[t]) {
        case 0: cast_f32_bf16((const float *)from[t] + start, (uint16_t *)to[t] + start, n); break;
        case 1: cast_bf16_f32((const uint16_t *)from[t] + start, (float *)to[t] + start, n); break;
        default: cast_f16_f32((const uint16_t *)from[t] + start, (float *)to[t] + start, n);
    })
    free(chunks);
    return 0;
}

/* amp_core.state.next_scale, in place. kind: 0 budget, 1 consecutive, 2 every. */
void amp_update_scale(float *scale, int32_t *tracker, int32_t *left, const float *found, double growth,
                      double backoff, int64_t interval, double floor, double ceiling, int32_t budget,
                      int kind) {
    if (*found > 0.0f) {
        int32_t remaining = *left - 1;
        *tracker = 0;
        if (remaining > 0) {
            *left = remaining;
            return;
        }
        double lowered = (double)(float)((double)*scale * backoff);
        lowered = lowered > floor ? lowered : floor;
        *scale = lowered < (double)*scale ? (float)lowered : *scale;
        *left = kind == 2 ? budget : (remaining > 0 ? remaining : 0);
        return;
    }
    if (*tracker + 1 < interval) {
        *tracker += 1;
        if (kind != 0)
            *left = budget;
        return;
    }
    float grown = (float)((double)*scale * growth);
    if (!is_bad(grown)) {
        double capped = (double)grown < ceiling ? (double)grown : ceiling;
        *scale = capped > (double)*scale ? (float)capped : *scale;
    }
    *tracker = 0;
    *left = budget;
}
