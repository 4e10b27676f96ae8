/* The CPU's gradient and cast kernels: plain C on raw pointers, independent of torch and Python
 * versions. Each tensor is divided into chunks by its size alone, reduced separately and in order, so no result
 * depends on the number of threads.
 *
 * dtype codes: 0 float32, 1 float64, 2 bfloat16, 3 float16.
 */
#include "common.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifndef _WIN32
#include <pthread.h>
#endif

#define ABI 10 /* increases when a function's arguments change; library.py checks it */

#define CHUNK (1u << 18) /* bytes: two or more chunks of a large weight stay in the second-level cache */
#define GRAIN 32768      /* elements of a tensor above which torch divides it among threads */
#define EXPONENT 0x7f800000u

/* Squares of small numbers are subnormal, which takes x86 a hundred times as long as what is normal. */
#ifdef X86
#define STREAM_END() _mm_sfence()
#define FLUSH_SUBNORMALS() _mm_setcsr(_mm_getcsr() | 0x8040u)
#define KEEP_SUBNORMALS() _mm_setcsr(_mm_getcsr() & ~0x8040u)
static unsigned fp_mode(void) { return _mm_getcsr(); }
static void set_fp_mode(unsigned mode) { _mm_setcsr(mode); }
#else
#define STREAM_END() (void)0
#define FLUSH_SUBNORMALS() (void)0
#define KEEP_SUBNORMALS() (void)0
static unsigned fp_mode(void) { return 0; }
static void set_fp_mode(unsigned mode) { (void)mode; }
#endif

typedef void stats_loop(const void *data, size_t n, double *sum, uint32_t *bad);
typedef void multiply_loop(void *data, size_t n, float factor, uint32_t *bad);
typedef void cast_loop(const void *from, void *to, size_t n, int stream);
typedef void add_loop(const void *from, float *total, size_t n);

struct loops {
    const char *name;
    stats_loop *stats[4];       /* by dtype code */
    multiply_loop *multiply[4]; /* by dtype code */
    cast_loop *cast[4][4];      /* by dtype codes of source and target; same-dtype casts are never requested */
    add_loop *add[4];           /* by dtype code; only 16-bit dtypes */
};

static int streaming; /* whether large casts store past the caches: amp_calibrate, amp_stream */

#ifdef X86
#define IN(name) name##_sse2
#define SET SSE2
#define NAME_OF_SET "SSE2"
#define WIDTH 16
#include "loops.h"
#undef IN
#undef SET
#undef NAME_OF_SET
#undef WIDTH

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("f16c")
#endif
#define IN(name) name##_f16c
#define SET F16C
#define NAME_OF_SET "SSE2 and F16C"
#define WIDTH 16
#include "loops.h"
#undef IN
#undef SET
#undef NAME_OF_SET
#undef WIDTH
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define IN(name) name##_avx2
#define SET AVX2
#define NAME_OF_SET "AVX2"
#define WIDTH 32
#include "loops.h"
#undef IN
#undef SET
#undef NAME_OF_SET
#undef WIDTH
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#define IN(name) name##_avx512
#define SET AVX512
#define NAME_OF_SET "AVX-512"
#define WIDTH 64
#include "loops.h"
#undef IN
#undef SET
#undef NAME_OF_SET
#undef WIDTH
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static int limit = 2;

static const struct loops *chosen(void) {
    if (limit >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &loops_avx512;
    if (limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &loops_avx2;
    if (limit >= 0 && __builtin_cpu_supports("avx2")) /* all that have AVX2 have F16C */
        return &loops_f16c;
    return &loops_sse2;
}
#else
#define IN(name) name##_only
#ifdef VECTORS
#define SET GENERIC
#define WIDTH 16
#ifdef NEON
#define NAME_OF_SET "NEON"
#else
#define NAME_OF_SET "16-byte vectors"
#endif
#else
#define SET SCALAR
#define NAME_OF_SET "scalar"
#endif
#include "loops.h"

static int limit = 0;

static const struct loops *chosen(void) { return &loops_only; }
#endif

EXPORT const char *amp_instruction_set(void) { return chosen()->name; }

EXPORT const char *amp_compiler(void) {
#if defined(__clang__)
    return __VERSION__; /* names itself */
#elif defined(__GNUC__)
    return "GCC " __VERSION__;
#else
    return "a compiler without vectors";
#endif
}

/* Use no instruction set above this (-1 SSE2, 0 F16C, 1 AVX2, 2 AVX-512). Returns the former limit. */
EXPORT int amp_limit(int level) {
    int before = limit;
    limit = level;
    return before;
}

/* For the other sources. */
int amp_level(void) {
#ifdef X86
    const struct loops *loops = chosen();
    return loops == &loops_avx512 ? 2 : loops == &loops_avx2;
#else
    return 0;
#endif
}

EXPORT int amp_abi(void) { return ABI; }

/* ---- threads ---- */

/* OpenMP's threads do not survive a fork and waiting for them would hang: the child uses one thread. */
static int forked;

#ifndef _WIN32
static void in_child(void) { forked = 1; }
#endif

/* Call once, before anything else. */
EXPORT int amp_start(void) {
#ifndef _WIN32
    return pthread_atfork(NULL, NULL, in_child);
#else
    return 0;
#endif
}

int amp_may_thread(void) { return !forked; }

static const size_t width_of[4] = {4, 8, 2, 2}; /* bytes, by dtype code */

/* chunks[i] is the number of the first chunk of tensor i; chunks[count] the number of all. */
static size_t *first_chunks(size_t count, const int64_t *sizes, const int32_t *dtypes) {
    size_t *chunks = malloc((count + 1) * sizeof *chunks);
    if (chunks == NULL)
        return NULL;
    chunks[0] = 0;
    for (size_t i = 0; i < count; i++) {
        size_t size = (size_t)sizes[i], most = CHUNK / width_of[dtypes[i]], least = (size + most - 1) / most;
        chunks[i + 1] = chunks[i] + (size > GRAIN ? (least + 1) / 2 * 2 : least); /* two threads share equally */
    }
    return chunks;
}

/* The first element of chunk k: a multiple of 64, so that chunks begin at cache lines; else they are equal. */
static size_t first_element(size_t size, size_t k, size_t chunks) {
    return k == chunks ? size : size * k / chunks / 64 * 64;
}

/* The first chunk of a thread's share of tensor t. As in torch's kernels, each thread has a share of each
 * tensor, so it finds in its own caches what the kernel before or after has there: on CPUs with several
 * third-level caches, another core's take several times as long. Where a tensor cannot be divided equally, the
 * shares of later tensors begin earlier, so that the threads have as much to do. */
static size_t first_of_share(size_t share, size_t threads, size_t t, size_t count, size_t chunks) {
    size_t at = share * chunks * 2 * count, earlier = threads * (2 * t + 1), unit = threads * 2 * count;
    return at > earlier ? (at - earlier + unit - 1) / unit : 0;
}

/* BACKWARD starts with the memory that a pass before has read last, which is still in the caches. */
enum order { FORWARD, BACKWARD };

#define SHARE(share, threads, order, ...)                                                          \
    for (size_t i_ = 0; i_ < count; i_++) {                                                        \
        size_t t = (order) == BACKWARD ? count - 1 - i_ : i_, own = chunks[t + 1] - chunks[t];     \
        size_t first = first_of_share((size_t)(share), (size_t)(threads), t, count, own);          \
        size_t end = first_of_share((size_t)(share) + 1, (size_t)(threads), t, count, own);        \
        for (size_t k_ = first; k_ < end; k_++) {                                                  \
            size_t k = (order) == BACKWARD ? first + end - 1 - k_ : k_;                            \
            size_t start = first_element((size_t)sizes[t], k, own);                                \
            size_t n = first_element((size_t)sizes[t], k + 1, own) - start;                        \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

/* OpenMP takes a microsecond to start one thread, as long as processing many small tensors: without need, it
 * is not asked. */
#define FOR_EACH_CHUNK(order, ...)                                                                 \
    if (threads > 1 && !forked) {                                                                  \
        OMP(parallel for schedule(static) num_threads(threads))                                    \
        for (int share = 0; share < threads; share++)                                              \
            SHARE(share, threads, order, __VA_ARGS__)                                              \
    } else {                                                                                       \
        SHARE(0, 1, order, __VA_ARGS__)                                                            \
    }

/* ---- the kernels ----
 *
 * Each takes its arguments in one block, whose layout library.py knows: ctypes converts a pointer to a block in
 * half the time of separate arguments, and small steps consist of such times. */

/* Tensors, and the number of threads that process them. */
struct tensors {
    int64_t count;
    void *const *data;
    const int64_t *sizes;
    const int32_t *dtypes;
    int64_t threads;
};

#define UNPACK(tensors)                                                                            \
    const struct loops *loops = chosen();                                                          \
    void *const *data = (tensors).data;                                                            \
    const int64_t *sizes = (tensors).sizes;                                                        \
    const int32_t *dtypes = (tensors).dtypes;                                                      \
    size_t count = (size_t)(tensors).count, *chunks = first_chunks(count, sizes, dtypes);          \
    int threads = (int)(tensors).threads

/* A norm as float or, if wide, as double. */
static void store(void *norms, size_t i, double sum, int wide) {
    if (wide)
        ((double *)norms)[i] = sqrt(sum);
    else
        ((float *)norms)[i] = (float)sqrt(sum);
}

struct grad_stats {
    struct tensors grads;
    void *norms;
    float *bad;
    void *norm;
    float *found;
    int64_t wide;
};

/* norms[i]: 2-norm of tensor i; bad[i]: 1 if it contains inf or NaN, else 0; *norm and *found: overall.
 * Norms are float or, if wide, double. The data is only read. */
EXPORT int amp_grad_stats(const struct grad_stats *args) {
    UNPACK(args->grads);
    float *bad = args->bad, *found = args->found;
    int wide = (int)args->wide;
    double *part = chunks ? calloc(chunks[count] + 1, sizeof *part) : NULL, total = 0.0;
    uint32_t *flag = chunks ? calloc(chunks[count] + 1, sizeof *flag) : NULL;
    int ok = part != NULL && flag != NULL;
    if (ok) {
        FOR_EACH_CHUNK(FORWARD, loops->stats[dtypes[t]](
            (const char *)data[t] + start * width_of[dtypes[t]], n, &part[chunks[t] + k], &flag[chunks[t] + k]);)
        *found = 0.0f;
        for (size_t t = 0; t < count; t++) {
            double sum = 0.0;
            bad[t] = 0.0f;
            for (size_t c = chunks[t]; c < chunks[t + 1]; c++) {
                sum += part[c];
                if (flag[c])
                    bad[t] = *found = 1.0f;
            }
            store(args->norms, t, sum, wide);
            total += sum;
        }
        store(args->norm, 0, total, wide);
    }
    free(part);
    free(flag);
    free(chunks);
    return ok ? 0 : -1;
}

struct multiply {
    struct tensors grads;
    const float *factor;
    float *found;
};

/* Multiply in place by *factor; *found becomes 1 if an element is not finite before or after. */
EXPORT int amp_multiply(const struct multiply *args) {
    UNPACK(args->grads);
    uint32_t overflow = 0;
    float by = isnan(*args->factor) ? NAN : *args->factor; /* one NaN, whose lower bits are zero */
    if (chunks == NULL)
        return -1;
    FOR_EACH_CHUNK(BACKWARD, uint32_t bad = 0;
        loops->multiply[dtypes[t]]((char *)data[t] + start * width_of[dtypes[t]], n, by, &bad);
        if (bad) {
            OMP(atomic)
            overflow |= 1;
        })
    if (overflow && args->found != NULL)
        *args->found = 1.0f;
    free(chunks);
    return 0;
}

#define STREAMED (1 << 23) /* bytes: results that are larger than this do not stay in a core's caches */

struct cast {
    struct tensors from;
    void *const *to;
    const int32_t *to_dtypes;
};

/* Cast tensor i from dtype from.dtypes[i] to to_dtypes[i]; they must not overlap. */
EXPORT int amp_cast(const struct cast *args) {
    UNPACK(args->from);
    void *const *to = args->to;
    const int32_t *to_dtypes = args->to_dtypes;
    size_t bytes = 0;
    if (chunks == NULL)
        return -1;
    for (size_t t = 0; t < count; t++)
        bytes += (size_t)sizes[t] * width_of[to_dtypes[t]];
    FOR_EACH_CHUNK(FORWARD, int32_t source = dtypes[t]; int32_t result = to_dtypes[t];
        char *target = (char *)to[t] + start * width_of[result];
        int stream = streaming && bytes > STREAMED && (uintptr_t)target % 64 == 0;
        loops->cast[source][result]((const char *)data[t] + start * width_of[source], target, n, stream);)
    free(chunks);
    return 0;
}

struct add {
    struct tensors grads;
    float *const *totals;
};

/* Add tensor i, of a half dtype, to totals[i], in float32; they must not overlap. */
EXPORT int amp_add(const struct add *args) {
    UNPACK(args->grads);
    float *const *totals = args->totals;
    if (chunks == NULL)
        return -1;
    FOR_EACH_CHUNK(FORWARD,
        loops->add[dtypes[t]]((const char *)data[t] + start * width_of[dtypes[t]], totals[t] + start, n);)
    free(chunks);
    return 0;
}

/* ---- tuning ---- */

/* Say whether large casts store past the caches: 1 yes, 0 no, -1 unchanged. Returns the setting. */
EXPORT int amp_stream(int streaming_) {
    if (streaming_ >= 0)
        streaming = streaming_;
    return streaming;
}

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define TRIALS 6
#define PATIENCE 0.03 /* seconds; on a busy machine there are fewer trials */
#define GAIN 0.97     /* streaming is switched on if it takes at most this part of the time without it */

/* Time casts with and without streaming stores, each the best of some trials in turns, over more memory than a
 * core's own caches hold. One thread does it: with more, a busy machine would be measured. */
EXPORT int amp_calibrate(void) {
    const int64_t elements = 1 << 22;
    const int32_t from = 0, to = 2;
    float *data = malloc((size_t)elements * sizeof *data);
    char *room = malloc((size_t)elements * 2 + 64);
    double best[2] = {INFINITY, INFINITY}, begun = now();
    if (data != NULL && room != NULL) {
        void *source = data, *target = room + (64 - (uintptr_t)room % 64) % 64;
        memset(target, 0, (size_t)elements * 2);
        for (int64_t i = 0; i < elements; i++)
            data[i] = 1.0f;
        for (int trial = 0; trial < 2 * TRIALS && (trial < 4 || now() - begun < PATIENCE); trial++) {
            streaming = trial % 2;
            double start = now(), taken;
            amp_cast(&(struct cast){{1, &source, &elements, &from, 1}, &target, &to});
            taken = now() - start;
            best[streaming] = taken < best[streaming] ? taken : best[streaming];
        }
        streaming = best[1] < GAIN * best[0];
    }
    free(data);
    free(room);
    return streaming;
}
