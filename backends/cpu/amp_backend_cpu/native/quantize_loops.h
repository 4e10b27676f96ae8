/* The loops of quantising over one piece of memory, in plain C that compilers turn into vectors. quantize.c
 * includes this file once for each instruction set, with IN(name), which adds the set's suffix. */

/* Widen `n` elements, exactly. */
static void IN(widen)(const uint16_t *from, int is_bf16, float *to, size_t n) {
    if (is_bf16)
        for (size_t i = 0; i < n; i++)
            to[i] = as_float((uint32_t)from[i] << 16);
    else
        for (size_t i = 0; i < n; i++) {
            uint32_t magnitude = (uint32_t)(from[i] & 0x7fff) << 13;
            uint32_t scaled = as_bits(as_float(magnitude) * 0x1p112f);
            uint32_t special = 0u - (uint32_t)(magnitude >= 0x0f800000u);
            to[i] = as_float(scaled | (special & INFINITE) | (uint32_t)(from[i] & 0x8000) << 16);
        }
}

INLINE uint32_t IN(largest_run)(const float *x, size_t n) {
    int32_t best = 0; /* bits of magnitudes are ordered as the magnitudes are, inf and then NaN last */
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(as_bits(x[i]) & MAGNITUDE);
        best = magnitude > best ? magnitude : best;
    }
    return (uint32_t)best;
}

/* Raise best[g] to the largest magnitude of group g, which is `group` elements long; `n` elements in all. */
static void IN(largest)(const float *x, size_t n, size_t group, uint32_t *best) {
    size_t whole = n / group * group, g = 0;
    if (group == 1) {
        for (size_t i = 0; i < n; i++) {
            int32_t magnitude = (int32_t)(as_bits(x[i]) & MAGNITUDE), other = (int32_t)best[i];
            best[i] = (uint32_t)(magnitude > other ? magnitude : other);
        }
        return;
    }
#define RUNS(LENGTH)                                                                                \
    for (size_t i = 0; i < whole; i += (LENGTH), g++) {                                             \
        uint32_t found = IN(largest_run)(x + i, (LENGTH));                                          \
        best[g] = found > best[g] ? found : best[g];                                                \
    }
    if (group == 16)
        RUNS(16)
    else if (group == 32)
        RUNS(32)
    else
        RUNS(group)
#undef RUNS
    if (whole < n) {
        uint32_t found = IN(largest_run)(x + whole, n - whole);
        best[g] = found > best[g] ? found : best[g];
    }
}

/* The scales of groups: amp_core.formats.scales.find_scales. A group with inf or NaN has the scale NaN. */
INLINE void IN(store_scale)(float scale, uint32_t code, int good, size_t i, void *out, int packed) {
    if (packed)
        ((uint8_t *)out)[i] = (uint8_t)code;
    else
        ((float *)out)[i] = good ? scale : as_float(0x7fc00000u);
}

INLINE void IN(float_scales)(const float *own, const float *found, size_t n, const struct scaling *to,
                             float *encode, float *scales, int power_of_two) {
    const float max = to->max;
    for (size_t i = 0; i < n; i++) {
        float by = max / found[i];
        by = by > 0x1p126f ? 0x1p126f : by;
        by = by < 0x1p-126f ? 0x1p-126f : by;
        by = power_of_two ? as_float(as_bits(by) & INFINITE) : by;
        by = found[i] == 0.0f ? 1.0f : by;
        by = (as_bits(found[i]) & MAGNITUDE) < INFINITE ? by : as_float(0x7fc00000u);
        encode[i] = by;
        scales[i] = (as_bits(own[i]) & MAGNITUDE) < INFINITE ? 1.0f / by : as_float(0x7fc00000u);
    }
}

INLINE void IN(power_scales)(const float *own, const float *found, size_t n, const struct scaling *to,
                             float *encode, void *out, int up, int packed) {
    const float max = to->max;
    const int32_t emax = to->emax;
    for (size_t i = 0; i < n; i++) {
        float x = up ? max / found[i] : found[i];
        int32_t power = (int32_t)(as_bits(x) >> 23 & 0xff), stored = up ? 254 - power : power - emax;
        stored = stored < 0 ? 0 : stored;
        stored = stored > 254 ? 254 : stored;
        int finite = (as_bits(found[i]) & MAGNITUDE) < INFINITE;
        int good = finite & ((as_bits(own[i]) & MAGNITUDE) < INFINITE);
        /* 2**-127 is subnormal in float32 */
        float by = stored == 254 ? as_float(0x00400000u) : as_float((uint32_t)(254 - stored) << 23);
        encode[i] = finite ? by : as_float(0x7fc00000u);
        float scale = stored == 0 ? as_float(0x00400000u) : as_float((uint32_t)stored << 23);
        IN(store_scale)(scale, good ? (uint32_t)stored : 0xffu, good, i, out, packed);
    }
}

INLINE void IN(e4m3_scales)(const float *own, const float *found, size_t n, const struct scaling *to,
                            float outer, float *encode, void *out, int packed) {
    const float max = to->max, inverse = 1.0f / outer;
    for (size_t i = 0; i < n; i++) {
        float x = found[i] / max / outer;
        x = x > 448.0f ? 448.0f : x; /* before rounding: it may be inf */
        float power = as_float(as_bits(x) & INFINITE);
        power = power < 0x1p-6f ? 0x1p-6f : power;
        float step = power * 0x1p-3f, rounded = (x / step + 0x1p23f - 0x1p23f) * step;
        rounded = rounded < 0x1p-9f ? 0x1p-9f : rounded;
        /* By masks: compilers would make branches of conditions on NaN, and no vectors. */
        uint32_t finite = 0u - (uint32_t)((as_bits(found[i]) & MAGNITUDE) < INFINITE);
        uint32_t bits = (as_bits(rounded) & finite) | (0x7fc00000u & ~finite);
        float by = inverse / as_float(bits);
        encode[i] = by > 0x1.fffffep127f ? 0x1.fffffep127f : by;
        uint32_t good = 0u - (uint32_t)((as_bits(own[i]) & MAGNITUDE) < INFINITE);
        good &= 0u - (uint32_t)((bits & MAGNITUDE) <= INFINITE);
        uint32_t small = (uint32_t)(int32_t)(as_float(bits & good) * 512.0f); /* exact, the code below 2**-6 */
        uint32_t below = 0u - (uint32_t)(bits < 0x3c800000u);
        uint32_t code = (small & below) | (((bits >> 20) - 960) & ~below);
        if (packed)
            ((uint8_t *)out)[i] = (uint8_t)((code & good) | (0x7fu & ~good));
        else
            ((uint32_t *)out)[i] = (bits & good) | (0x7fc00000u & ~good);
    }
}

static void IN(scales)(const float *own, const float *found, size_t n, const struct scaling *to, float outer,
                       float *encode, void *out, int packed) {
    switch (to->kind) {
    case 0:
        IN(float_scales)(own, found, n, to, encode, out, 0);
        break;
    case 1:
        IN(float_scales)(own, found, n, to, encode, out, 1);
        break;
    case 2:
        if (packed)
            IN(power_scales)(own, found, n, to, encode, out, 0, 1);
        else
            IN(power_scales)(own, found, n, to, encode, out, 0, 0);
        break;
    case 3:
        if (packed)
            IN(power_scales)(own, found, n, to, encode, out, 1, 1);
        else
            IN(power_scales)(own, found, n, to, encode, out, 1, 0);
        break;
    default:
        if (packed)
            IN(e4m3_scales)(own, found, n, to, outer, encode, out, 1);
        else
            IN(e4m3_scales)(own, found, n, to, outer, encode, out, 0);
    }
}

/* Count inf and NaN. */
static void IN(nonfinite)(const float *x, size_t n, int64_t *counts) {
    uint32_t infinite = 0, nan = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = as_bits(x[i]) & MAGNITUDE;
        infinite += magnitude == INFINITE;
        nan += magnitude > INFINITE;
    }
    counts[0] += infinite;
    counts[1] += nan;
}

/* 24 random bits of an element's number: amp_core.common.counter_random.random_bits. */
INLINE uint32_t IN(mix)(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Round x[i] * encode[i], or * encode[0] if `shared`, to multiples of `step`, the distance of the format's
 * values there: adding 2**23 steps leaves no bits below one, and the sum's own bits count the steps. With
 * those of the binades below they are the code. Larger than the largest becomes that. `bounded`: all elements
 * are finite and no product rounds to more than the largest value. `out` receives codes, or bits of floats. */
INLINE void IN(round)(const float *x, const float *encode, size_t n, const struct element *to,
                      const struct draws *draws, uint32_t number, uint32_t *out, int64_t *counts, int shared,
                      int stochastic, int coded, int bounded) {
    const uint32_t cut = 23 - to->mantissa_bits, rise = cut << 23, smallest = to->smallest_normal;
    const int32_t least = (int32_t)smallest, limit = (int32_t)to->limit, top = (int32_t)to->largest_code;
    const uint32_t first = draws->first, second = draws->second, stride = draws->stride;
    const uint32_t nan = coded ? to->nan_code : 0x7fc00000u, sign_bit = coded ? to->sign_bit : 31;
    const float largest = to->max;
    uint32_t saturated = 0, flushed = 0;
    for (size_t i = 0; i < n; i++) {
        float by = encode[shared ? 0 : i];
        uint32_t before = as_bits(x[i]) & MAGNITUDE, sign = as_bits(x[i]) >> 31 << sign_bit;
        uint32_t good = (uint32_t)(by == by) & (uint32_t)(before < INFINITE);
        int32_t scaled = (int32_t)(as_bits(x[i] * by) & MAGNITUDE);
        uint32_t magnitude = (uint32_t)(bounded || scaled < limit ? scaled : limit);
        int32_t binade = (int32_t)(magnitude & INFINITE);
        uint32_t power = (uint32_t)(binade > least ? binade : least);
        float shift = as_float(power + rise), rounded;
        int32_t code;
        if (stochastic) {
            uint32_t bits = IN(mix)(IN(mix)(number + (uint32_t)i * stride + first) ^ second) & 0xffffffu;
            float steps = as_float(magnitude) * as_float((254u << 23) - (power + rise) + (23u << 23));
            int32_t whole = (int32_t)steps;
            whole += (float)(int32_t)bits * 0x1p-24f < steps - (float)whole;
            rounded = (float)whole * as_float(power + rise - (23u << 23));
            code = whole + (int32_t)((power - smallest) >> cut);
        } else {
            float sum = as_float(magnitude) + shift;
            rounded = sum - shift;
            code = (int32_t)(as_bits(sum) - as_bits(shift) + ((power - smallest) >> cut));
        }
        if (bounded) {
            flushed += (uint32_t)(code == 0) - (uint32_t)(before == 0);
            out[i] = sign | (coded ? (uint32_t)code : as_bits(rounded));
        } else {
            saturated += (uint32_t)(code > top) & good;
            flushed += (uint32_t)(code == 0) & (uint32_t)(before != 0) & good;
            code = code < top ? code : top;
            rounded = rounded < largest ? rounded : largest;
            out[i] = good ? sign | (coded ? (uint32_t)code : as_bits(rounded)) : nan;
        }
    }
    counts[0] += saturated;
    counts[1] += flushed;
}

/* By themselves: GCC would narrow each operand of the last operation. */
static void IN(store_codes)(const uint32_t *codes, size_t n, uint8_t *out) {
    for (size_t i = 0; i < n; i++)
        out[i] = (uint8_t)codes[i];
}

#define ROUND(NAME, SHARED, STOCHASTIC, BOUNDED)                                                    \
    static void IN(round_##NAME)(const float *x, const float *encode, size_t n,                     \
                                 const struct element *to, const struct draws *draws,               \
                                 uint32_t number, void *out, int64_t *counts) {                     \
        IN(round)(x, encode, n, to, draws, number, out, counts, SHARED, STOCHASTIC, 0, BOUNDED);    \
    }                                                                                               \
    static void IN(code_##NAME)(const float *x, const float *encode, size_t n,                      \
                                const struct element *to, const struct draws *draws,                \
                                uint32_t number, void *out, int64_t *counts) {                      \
        uint32_t codes[PART];                                                                       \
        for (size_t i = 0, part; i < n; i += part) {                                                \
            part = n - i < PART ? n - i : PART;                                                     \
            IN(round)(x + i, encode + (SHARED ? 0 : i), part, to, draws,                            \
                      number + (uint32_t)i * draws->stride, codes, counts, SHARED, STOCHASTIC, 1,   \
                      BOUNDED);                                                                     \
            IN(store_codes)(codes, part, (uint8_t *)out + i);                                       \
        }                                                                                           \
    }

ROUND(columns, 0, 0, 0)
ROUND(run, 1, 0, 0)
ROUND(bounded_run, 1, 0, 1)
ROUND(drawn_columns, 0, 1, 0)
ROUND(drawn_run, 1, 1, 0)
#undef ROUND

/* Repeat each of `from` for the `width` elements of its group; `n` elements in all. */
static void IN(spread)(const float *from, size_t n, size_t width, float *to) {
#define SPREAD(WIDTH)                                                                               \
    for (size_t i = 0; i < n; i += (WIDTH)) {                                                       \
        float value = from[i / (WIDTH)];                                                            \
        for (size_t j = 0; j < (WIDTH); j++) /* past the end, up to a whole group */                \
            to[i + j] = value;                                                                      \
    }
    if (width == 16)
        SPREAD(16)
    else if (width == 32)
        SPREAD(32)
    else
        SPREAD(width)
#undef SPREAD
}

/* Store codes of 4 bits two to a byte, the first in the low half. */
static void IN(store_pairs)(const uint8_t *codes, size_t n, uint8_t *out) {
    for (size_t i = 0; i < n / 2; i++)
        out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
}

static const struct quantizing_loops IN(quantizing) = {
    IN(widen),
    IN(largest),
    IN(nonfinite),
    IN(scales),
    IN(spread),
    IN(store_pairs),
    {{{IN(round_columns), IN(code_columns)}, {IN(round_drawn_columns), IN(code_drawn_columns)}},
     {{IN(round_run), IN(code_run)}, {IN(round_drawn_run), IN(code_drawn_run)}}},
    {IN(round_bounded_run), IN(code_bounded_run)},
};
