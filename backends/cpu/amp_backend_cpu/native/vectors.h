/* Vectors of one instruction set, as wide as its registers. loops.h includes this file once for each set.
 *
 * Arithmetic is written with the operators that GCC and Clang give to vectors. Intrinsics appear only where
 * elements change width, and for stores that bypass the caches. A `pair` is what one vector of 16-bit elements
 * widens to.
 */
#define floats IN(floats)
#define words IN(words)
#define halves IN(halves)
#define doubles IN(doubles)
#define pair IN(pair)

#if SET == SCALAR
typedef float floats;
typedef uint32_t words;
typedef uint16_t halves[2];
typedef double doubles;
#define LANES 1
#define MASK(condition) ((words)0 - (words)(condition))
INLINE words IN(as_words)(floats v) { words w; memcpy(&w, &v, sizeof w); return w; }
INLINE floats IN(as_floats)(words w) { floats v; memcpy(&v, &w, sizeof v); return v; }
#define LANE(v, k) (v)
#else
typedef float floats __attribute__((vector_size(WIDTH)));
typedef uint32_t words __attribute__((vector_size(WIDTH)));
typedef uint16_t halves __attribute__((vector_size(WIDTH)));
typedef double doubles __attribute__((vector_size(WIDTH)));
#define LANES (WIDTH / 4)
#define MASK(condition) ((words)(condition))
INLINE words IN(as_words)(floats v) { return (words)v; }
INLINE floats IN(as_floats)(words w) { return (floats)w; }
#define LANE(v, k) ((v)[k])
#endif
#define PAIR (2 * LANES)

typedef struct {
    floats a, b;
} pair;

/* Store one vector; `stream`, a constant, sends it past the caches, for which `to` must be aligned. */
#if SET == AVX512
#define STREAM(to, v) _mm512_stream_si512((__m512i *)(to), (__m512i)(v))
#elif SET == AVX2
#define STREAM(to, v) _mm256_stream_si256((__m256i *)(to), (__m256i)(v))
#elif SET == SSE2 || SET == F16C
#define STREAM(to, v) _mm_stream_si128((__m128i *)(to), (__m128i)(v))
#else
#define STREAM(to, v) memcpy((to), &(v), sizeof(v))
#endif
#define STORE(to, v, stream)                                                                       \
    do {                                                                                           \
        if (stream)                                                                                \
            STREAM(to, v);                                                                         \
        else                                                                                       \
            memcpy((to), &(v), sizeof(v));                                                         \
    } while (0)

INLINE pair IN(load_f32)(const float *from) {
    pair v;
    memcpy(&v.a, from, sizeof v.a);
    memcpy(&v.b, from + LANES, sizeof v.b);
    return v;
}

INLINE void IN(store_f32)(float *to, pair v, int stream) {
    STORE(to, v.a, stream);
    STORE(to + LANES, v.b, stream);
}

/* Round to nearest even: the result is in the upper 16 bits, what is left in the lower ones is noise. Without
 * the mask some NaN would be rounded into an inf or a zero. */
INLINE words IN(round_bf16)(floats v) {
    words bits = IN(as_words)(v);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) | (MASK(v != v) & 0x7fc00000u);
}

/* The elements of a float16 as words, and back: without hardware for it. Exponent and mantissa are shifted
 * into place and the bias is set. Subnormals are normalised by a subtraction of normal numbers: a product
 * with subnormals takes a hundred times as long. Comparisons are signed: SSE2 has no others. */
#if SET == SSE2 || SET == SCALAR || SET == GENERIC
#define signed_(w) IN(as_signed)(w)
#if SET == SCALAR
INLINE int32_t IN(as_signed)(words w) { return (int32_t)w; }
#else
typedef int32_t IN(ints) __attribute__((vector_size(WIDTH)));
INLINE IN(ints) IN(as_signed)(words w) { return (IN(ints))w; }
#endif

INLINE floats IN(widen_f16)(words bits) {
    words magnitude = (bits & 0x7fffu) << 13;
    words normal = magnitude + 0x38000000u;
    words special = MASK(signed_(magnitude) > 0x0f7fffff);
    words small = MASK(signed_(magnitude) < 0x00800000);
    words normalised = IN(as_words)(IN(as_floats)(normal + 0x00800000u) - 0x1p-14f);
    return IN(as_floats)(((bits & 0x8000u) << 16) | (small & normalised) |
                         (~small & (normal + (special & 0x38000000u))));
}

/* Round to nearest even, subnormals by an addition that aligns their last bit with that of 0.5. */
INLINE words IN(narrow_f16)(floats v) {
    words bits = IN(as_words)(v), magnitude = bits & 0x7fffffffu;
    words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    words subnormal = IN(as_words)(IN(as_floats)(magnitude) + 0.5f) - 0x3f000000u;
    words small = MASK(signed_(magnitude) < 0x38800000);
    words large = MASK(signed_(magnitude) > 0x477fffff);
    words special = 0x7c00u | (MASK(v != v) & 0x200u);
    words result = (small & subnormal) | (~small & ~large & normal) | (large & special);
    return result | ((bits >> 16) & 0x8000u);
}
#undef signed_
#endif

#if SET == SCALAR
INLINE pair IN(load_bf16)(const uint16_t *from) {
    return (pair){IN(as_floats)((words)from[0] << 16), IN(as_floats)((words)from[1] << 16)};
}

INLINE pair IN(load_f16)(const uint16_t *from) {
    return (pair){IN(widen_f16)(from[0]), IN(widen_f16)(from[1])};
}

INLINE pair IN(split_bf16)(const uint16_t *from) { return IN(load_bf16)(from); }

#define store_parts(to, first, second)                                                             \
    do {                                                                                           \
        (to)[0] = (uint16_t)(first);                                                               \
        (to)[1] = (uint16_t)(second);                                                              \
    } while (0)

INLINE void IN(store_bf16)(uint16_t *to, pair v, int stream) {
    (void)stream;
    store_parts(to, IN(round_bf16)(v.a) >> 16, IN(round_bf16)(v.b) >> 16);
}

INLINE void IN(store_f16)(uint16_t *to, pair v, int stream) {
    (void)stream;
    store_parts(to, IN(narrow_f16)(v.a), IN(narrow_f16)(v.b));
}
#undef store_parts
#else
/* Every word holds two bfloat16, either of which is one shift or mask away from its float. The order of
 * elements changes, so this serves sums and products in place, which do not depend on it. */
INLINE pair IN(split_bf16)(const uint16_t *from) {
    words bits;
    memcpy(&bits, from, sizeof bits);
    return (pair){IN(as_floats)(bits << 16), IN(as_floats)(bits & 0xffff0000u)};
}

/* The lower half of each word of `low` with the upper half of `high`. */
INLINE halves IN(blend)(words low, words high) {
#if SET == AVX512
    return (halves)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)high);
#elif SET == AVX2
    return (halves)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xaa);
#elif SET == F16C /* which includes SSE4.1 */
    return (halves)_mm_blend_epi16((__m128i)low, (__m128i)high, 0xaa);
#else
    return (halves)((low & 0xffffu) | (high & 0xffff0000u));
#endif
}

/* a - b, or 0 where b is larger. */
INLINE halves IN(difference)(halves a, halves b) {
#if SET == AVX512
    return (halves)_mm512_subs_epu16((__m512i)a, (__m512i)b);
#elif SET == AVX2
    return (halves)_mm256_subs_epu16((__m256i)a, (__m256i)b);
#elif SET == SSE2 || SET == F16C
    return (halves)_mm_subs_epu16((__m128i)a, (__m128i)b);
#elif defined(NEON)
    return (halves)vqsubq_u16((uint16x8_t)a, (uint16x8_t)b);
#else
    return (a - b) & (halves)(a > b);
#endif
}

/* Round to nearest even, both floats of a word at once: `rest`, less 1 where `kept` is even, has its highest
 * bit set where `kept` goes up. A NaN stays one: neither those of bfloat16 nor the factor's have a `rest`. */
INLINE halves IN(join_bf16)(pair v) {
    words a = IN(as_words)(v.a), b = IN(as_words)(v.b);
    halves kept = IN(blend)(a >> 16, b), rest = IN(blend)(a, b << 16);
    return kept + (IN(difference)(rest, ~kept & 1) >> 15);
}

/* The larger of each two elements, which are below 0x8000. */
INLINE halves IN(larger)(halves a, halves b) {
#if SET == AVX512
    return (halves)_mm512_max_epi16((__m512i)a, (__m512i)b);
#elif SET == AVX2
    return (halves)_mm256_max_epi16((__m256i)a, (__m256i)b);
#elif SET == SSE2 || SET == F16C
    return (halves)_mm_max_epi16((__m128i)a, (__m128i)b);
#else
    halves first = (halves)(a > b);
    return (a & first) | (b & ~first);
#endif
}

#if SET == AVX512
INLINE pair IN(load_bf16)(const uint16_t *from) {
    __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + LANES)));
    return (pair){(floats)((words)a << 16), (floats)((words)b << 16)};
}

/* The lower 16 bits of each word of `a`, then of `b`. */
INLINE halves IN(pack)(words a, words b) {
    __m512i first = _mm512_castsi256_si512(_mm512_cvtepi32_epi16((__m512i)a));
    return (halves)_mm512_inserti64x4(first, _mm512_cvtepi32_epi16((__m512i)b), 1);
}

INLINE pair IN(load_f16)(const uint16_t *from) {
    return (pair){(floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)),
                  (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + LANES)))};
}

INLINE halves IN(join_f16)(pair v) {
    __m256i a = _mm512_cvtps_ph((__m512)v.a, _MM_FROUND_TO_NEAREST_INT);
    __m256i b = _mm512_cvtps_ph((__m512)v.b, _MM_FROUND_TO_NEAREST_INT);
    return (halves)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
#elif SET == AVX2
INLINE pair IN(load_bf16)(const uint16_t *from) {
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + LANES)));
    return (pair){(floats)((words)a << 16), (floats)((words)b << 16)};
}

INLINE halves IN(pack)(words a, words b) {
    __m256i mixed = _mm256_packus_epi32((__m256i)a, (__m256i)b);
    return (halves)_mm256_permute4x64_epi64(mixed, 0xd8);
}

INLINE pair IN(load_f16)(const uint16_t *from) {
    return (pair){(floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                  (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + LANES)))};
}

INLINE halves IN(join_f16)(pair v) {
    __m128i a = _mm256_cvtps_ph((__m256)v.a, _MM_FROUND_TO_NEAREST_INT);
    __m128i b = _mm256_cvtps_ph((__m256)v.b, _MM_FROUND_TO_NEAREST_INT);
    return (halves)_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}
#elif SET == SSE2 || SET == F16C
INLINE pair IN(load_bf16)(const uint16_t *from) {
    __m128i raw = _mm_loadu_si128((const __m128i *)from), zero = _mm_setzero_si128();
    return (pair){(floats)_mm_unpacklo_epi16(zero, raw), (floats)_mm_unpackhi_epi16(zero, raw)};
}

INLINE halves IN(pack)(words a, words b) {
    /* SSE2 packs with signed saturation: the sign is extended first, so that nothing saturates. */
    __m128i first = _mm_srai_epi32(_mm_slli_epi32((__m128i)a, 16), 16);
    __m128i second = _mm_srai_epi32(_mm_slli_epi32((__m128i)b, 16), 16);
    return (halves)_mm_packs_epi32(first, second);
}

#if SET == F16C
INLINE pair IN(load_f16)(const uint16_t *from) {
    return (pair){(floats)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)from)),
                  (floats)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(from + LANES)))};
}

INLINE halves IN(join_f16)(pair v) {
    __m128i a = _mm_cvtps_ph((__m128)v.a, _MM_FROUND_TO_NEAREST_INT);
    __m128i b = _mm_cvtps_ph((__m128)v.b, _MM_FROUND_TO_NEAREST_INT);
    return (halves)_mm_unpacklo_epi64(a, b);
}
#else
INLINE pair IN(load_f16)(const uint16_t *from) {
    __m128i raw = _mm_loadu_si128((const __m128i *)from), zero = _mm_setzero_si128();
    return (pair){IN(widen_f16)((words)_mm_unpacklo_epi16(raw, zero)),
                  IN(widen_f16)((words)_mm_unpackhi_epi16(raw, zero))};
}
#endif
#else
typedef uint16_t IN(narrow) __attribute__((vector_size(WIDTH / 2)));

INLINE pair IN(load_bf16)(const uint16_t *from) {
    IN(narrow) raw[2];
    memcpy(raw, from, sizeof raw);
    return (pair){IN(as_floats)(__builtin_convertvector(raw[0], words) << 16),
                  IN(as_floats)(__builtin_convertvector(raw[1], words) << 16)};
}

INLINE halves IN(pack)(words a, words b) {
    IN(narrow) parts[2] = {__builtin_convertvector(a, IN(narrow)), __builtin_convertvector(b, IN(narrow))};
    halves packed;
    memcpy(&packed, parts, sizeof packed);
    return packed;
}

#ifdef NEON
INLINE pair IN(load_f16)(const uint16_t *from) {
    float16x8_t raw = vreinterpretq_f16_u16(vld1q_u16(from));
    return (pair){(floats)vcvt_f32_f16(vget_low_f16(raw)), (floats)vcvt_high_f32_f16(raw)};
}

INLINE halves IN(join_f16)(pair v) {
    float16x4_t first = vcvt_f16_f32((float32x4_t)v.a);
    return (halves)vreinterpretq_u16_f16(vcvt_high_f16_f32(first, (float32x4_t)v.b));
}
#else
INLINE pair IN(load_f16)(const uint16_t *from) {
    IN(narrow) raw[2];
    memcpy(raw, from, sizeof raw);
    return (pair){IN(widen_f16)(__builtin_convertvector(raw[0], words)),
                  IN(widen_f16)(__builtin_convertvector(raw[1], words))};
}
#endif
#endif

#if SET == SSE2 || (SET == GENERIC && !defined(NEON))
INLINE halves IN(join_f16)(pair v) { return IN(pack)(IN(narrow_f16)(v.a), IN(narrow_f16)(v.b)); }
#endif

INLINE void IN(store_bf16)(uint16_t *to, pair v, int stream) {
    halves packed = IN(pack)(IN(round_bf16)(v.a) >> 16, IN(round_bf16)(v.b) >> 16);
    STORE(to, packed, stream);
}

INLINE void IN(store_f16)(uint16_t *to, pair v, int stream) {
    halves packed = IN(join_f16)(v);
    STORE(to, packed, stream);
}
#endif
