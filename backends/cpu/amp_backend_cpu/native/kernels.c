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
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#define X86 1
#include <immintrin.h>
#endif

#define ABI 4 /* moves with every change to what a function takes; kernels.py asks for it */

#define CHUNK 32768 /* elements: two or more chunks of a large weight stay in the second-level cache */
#define AHEAD 6144  /* bytes to fetch in advance into the second-level cache, which has more reads in flight */
#define BLOCK 4096  /* elements of a half dtype that are summed in float32 */
#define WIDTH 16    /* elements that one step of a loop takes; a tail goes through a buffer of that size */

/* Vectors of the compiler's (GCC and Clang), lowered to what the instruction set has. */
typedef float floats __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t words __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t halves __attribute__((vector_size(WIDTH * 2)));
typedef double doubles __attribute__((vector_size(WIDTH * 8)));

#define EXPONENT 0x7f800000u

typedef void measure_loop(const void *data, size_t n, double *sum, uint32_t *bad);
typedef void scale_loop(void *data, size_t n, float factor, uint32_t *bad);
typedef void cast_loop(const void *from, void *to, size_t n, int stream);
typedef void add_loop(const void *from, float *total, size_t n);

struct loops {
    measure_loop *measure[4]; /* by dtype code */
    scale_loop *scale[4];     /* by dtype code */
    cast_loop *cast[4][4];    /* by dtype codes of source and target; a dtype to itself is never asked */
    add_loop *add[4];         /* by dtype code; of the halves alone */
};

#ifdef X86
#define STREAMED (1 << 23) /* bytes: results that are larger than this do not stay in a core's caches */
#define STREAM(to, made)                                                                           \
    for (size_t k_ = 0; k_ < sizeof(made) / sizeof(STREAM_UNIT); k_++)                             \
    STREAM_STORE((STREAM_UNIT *)(to) + k_, ((const STREAM_UNIT *)&(made))[k_])
#define STREAM_END() _mm_sfence()
#else
#define STREAMED SIZE_MAX
#define STREAM(to, made) memcpy((to), &(made), sizeof(made))
#define STREAM_END() (void)0
#endif

#define IN(name) name##_baseline
#define HALVES_AT_ONCE 0 /* how many of them an instruction converts */
#define STREAM_UNIT __m128i
#define STREAM_STORE _mm_stream_si128
#include "loops.h"
#undef STREAM_UNIT
#undef STREAM_STORE
#undef HALVES_AT_ONCE
#undef IN

#ifdef X86
#define STREAM_UNIT __m256i
#define STREAM_STORE _mm256_stream_si256
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#define IN(name) name##_avx2
#define HALVES_AT_ONCE 8
#include "loops.h"
#undef HALVES_AT_ONCE
#undef IN
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#define IN(name) name##_avx512
#define HALVES_AT_ONCE 16
#include "loops.h"
#undef HALVES_AT_ONCE
#undef IN
#pragma GCC pop_options

static int limit = 2;

static const struct loops *chosen(void) {
    if (limit >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &loops_avx512;
    if (limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &loops_avx2;
    return &loops_baseline;
}

const char *amp_instruction_set(void) {
    const struct loops *loops = chosen();
    return loops == &loops_avx512 ? "AVX-512" : loops == &loops_avx2 ? "AVX2" : "baseline";
}
#else
static int limit = 0;

static const struct loops *chosen(void) { return &loops_baseline; }

const char *amp_instruction_set(void) { return "baseline"; }
#endif

/* Use no instruction set above this (0 baseline, 1 AVX2, 2 AVX-512); for tests. Returns the former limit. */
int amp_limit(int level) {
    int before = limit;
    limit = level;
    return before;
}

int amp_abi(void) { return ABI; }

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

static const size_t width_of[4] = {4, 8, 2, 2}; /* bytes, by dtype code */

/* A thread takes neighbouring chunks: it searches for the tensor of the first alone. */
#define FOR_EACH_CHUNK(...)                                                                        \
    _Pragma("omp parallel num_threads(threads)") {                                                 \
        size_t t = count;                                                                          \
        _Pragma("omp for schedule(static)")                                                        \
        for (int64_t c = 0; c < (int64_t)chunks[count]; c++) {                                     \
            if (t == count)                                                                        \
                t = tensor_of(chunks, count, (size_t)c);                                           \
            while (chunks[t + 1] <= (size_t)c)                                                     \
                t++;                                                                               \
            size_t start = ((size_t)c - chunks[t]) * CHUNK;                                        \
            size_t n = (size_t)sizes[t] - start < CHUNK ? (size_t)sizes[t] - start : CHUNK;        \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

/* A norm as float or, if wide, as double. */
static void store(void *norms, size_t i, double sum, int wide) {
    if (wide)
        ((double *)norms)[i] = sqrt(sum);
    else
        ((float *)norms)[i] = (float)sqrt(sum);
}

/* norms[i]: 2-norm of tensor i; bad[i]: 1 if it holds an inf or a NaN, else 0; *norm and *found: of all.
 * Norms are float or, if wide, double. The data is only read. */
int amp_measure(int64_t count_, const void *const *data, const int64_t *sizes, const int32_t *dtypes,
                void *norms, float *bad, void *norm, float *found, int wide, int threads) {
    const struct loops *loops = chosen();
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes);
    double *part = chunks ? calloc(chunks[count] + 1, sizeof *part) : NULL, total = 0.0;
    uint32_t *flag = chunks ? calloc(chunks[count] + 1, sizeof *flag) : NULL;
    int ok = part != NULL && flag != NULL;
    if (ok) {
        FOR_EACH_CHUNK(loops->measure[dtypes[t]](
            (const char *)data[t] + start * width_of[dtypes[t]], n, &part[c], &flag[c]);)
        *found = 0.0f;
        for (size_t t = 0; t < count; t++) {
            double sum = 0.0;
            bad[t] = 0.0f;
            for (size_t c = chunks[t]; c < chunks[t + 1]; c++) {
                sum += part[c];
                if (flag[c])
                    bad[t] = *found = 1.0f;
            }
            store(norms, t, sum, wide);
            total += sum;
        }
        store(norm, 0, total, wide);
    }
    free(part);
    free(flag);
    free(chunks);
    return ok ? 0 : -1;
}

/* Multiply in place by *factor; *found becomes 1 if an element is not finite before or after. */
int amp_scale(int64_t count_, void *const *data, const int64_t *sizes, const int32_t *dtypes,
              const float *factor, float *found, int threads) {
    const struct loops *loops = chosen();
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes);
    uint32_t overflow = 0;
    float by = *factor;
    if (chunks == NULL)
        return -1;
    FOR_EACH_CHUNK(uint32_t bad = 0;
        loops->scale[dtypes[t]]((char *)data[t] + start * width_of[dtypes[t]], n, by, &bad);
        if (bad) {
        _Pragma("omp atomic write")
        overflow = 1;
    })
    if (overflow && found != NULL)
        *found = 1.0f;
    free(chunks);
    return 0;
}

/* Cast tensor i from dtype from_dtypes[i] to to_dtypes[i]; the two have no memory in common. */
int amp_cast(int64_t count_, const void *const *from, const int64_t *sizes, const int32_t *from_dtypes,
             void *const *to, const int32_t *to_dtypes, int threads) {
    const struct loops *loops = chosen();
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes), bytes = 0;
    if (chunks == NULL)
        return -1;
    for (size_t t = 0; t < count; t++)
        bytes += (size_t)sizes[t] * width_of[to_dtypes[t]];
    FOR_EACH_CHUNK(int32_t source = from_dtypes[t]; int32_t made = to_dtypes[t];
        char *target = (char *)to[t] + start * width_of[made];
        int stream = bytes > STREAMED && (uintptr_t)target % 32 == 0;
        loops->cast[source][made]((const char *)from[t] + start * width_of[source], target, n, stream);)
    free(chunks);
    return 0;
}

/* Add tensor i, of a half dtype, to totals[i], in float32; the two have no memory in common. */
int amp_add(int64_t count_, const void *const *from, const int64_t *sizes, const int32_t *dtypes,
            float *const *totals, int threads) {
    const struct loops *loops = chosen();
    size_t count = (size_t)count_, *chunks = first_chunks(count, sizes);
    if (chunks == NULL)
        return -1;
    FOR_EACH_CHUNK(
        loops->add[dtypes[t]]((const char *)from[t] + start * width_of[dtypes[t]], totals[t] + start, n);)
    free(chunks);
    return 0;
}

/* amp_core.states.loss_scale.next_scale, in place. kind: 0 budget, 1 consecutive, 2 every. */
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
    if (isfinite(grown)) {
        double capped = (double)grown < ceiling ? (double)grown : ceiling;
        *scale = capped > (double)*scale ? (float)capped : *scale;
    }
    *tracker = 0;
    *left = budget;
}
