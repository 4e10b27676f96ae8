/* Runs the CPU's kernels, whose source this file includes, against plain arithmetic, without Python or torch:
 * on other architectures under an emulator, and on compilers without vectors. Exits with 0 if all agree. */
#include "kernels.c"
#include "quantize.c"
#include "storage.c"
#include <stdio.h>

#define EXPECT(condition, ...)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("line %d: ", __LINE__);                                                         \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
            failures++;                                                                            \
        }                                                                                          \
    } while (0)

static int failures;

static double value_of(uint16_t bits, int dtype) {
    int exponent_bits = dtype == 2 ? 8 : 5, mantissa_bits = 15 - exponent_bits;
    int exponent = (bits & 0x7fff) >> mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    double mantissa = bits & ((1 << mantissa_bits) - 1), sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1)
        return mantissa != 0.0 ? NAN : sign * INFINITY;
    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static void cast(void *from, int source, void *to, int target, int64_t n) {
    int32_t codes[2] = {source, target};
    amp_cast(&(struct cast){{1, &from, &n, &codes[0], 2}, &to, &codes[1]});
}

static void every_half(int dtype) {
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    static double wider[65536];
    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    cast(all, dtype, wide, 0, 65536);
    cast(wide, 0, back, dtype, 65536);
    for (int i = 0; i < 65536; i++) {
        double right = value_of(all[i], dtype);
        EXPECT(isnan(right) ? isnan(wide[i]) : wide[i] == right, "%x of dtype %d is %g", i, dtype, wide[i]);
        EXPECT(isnan(right) ? isnan(value_of(back[i], dtype)) : back[i] == i, "%x came back as %x", i, back[i]);
    }
    /* Next to the tie above each number, in doubles: rounded once. */
    int last = dtype == 2 ? 0x7f7f : 0x7bff;
    for (int side = -1; side <= 1; side += 2) {
        for (int i = 0; i < last; i++) {
            double tie = (value_of((uint16_t)i, dtype) + value_of((uint16_t)(i + 1), dtype)) / 2;
            wider[i] = nextafter(tie, side * INFINITY);
        }
        cast(wider, 1, back, dtype, last);
        for (int i = 0; i < last; i++)
            EXPECT(back[i] == i + (side > 0), "side %d of the tie above %x gives %x", side, i, back[i]);
    }
}

static void norms_products_sums(int dtype, int64_t n) {
    size_t width = width_of[dtype];
    double *exact = malloc((size_t)n * sizeof *exact), sum = 0.0, norm64, total64;
    char *data = malloc((size_t)n * width);
    float *total = malloc((size_t)n * 4), norm, bad = 0.0f, all, found, factor = 0.25f;
    for (int64_t i = 0; i < n; i++)
        exact[i] = (double)((i * 2654435761u) % 251) / 16.0 - 7.0; /* eight bits: exact in every dtype */
    int32_t wide = dtype == 1;
    if (wide)
        memcpy(data, exact, (size_t)n * 8);
    else
        cast(exact, 1, data, dtype, n);
    for (int64_t i = 0; i < n; i++)
        sum += exact[i] * exact[i];
    void *address = data;
    const struct tensors grads = {1, &address, &n, &dtype, 2};
    amp_grad_stats(&(struct grad_stats){
        grads, wide ? (void *)&norm64 : &norm, &bad, wide ? (void *)&total64 : &all, &found, wide});
    double got = wide ? norm64 : norm;
    EXPECT(fabs(got - sqrt(sum)) <= 1e-6 * sqrt(sum), "norm of %d, dtype %d: %g", (int)n, dtype, got);
    EXPECT(bad == 0.0f && found == 0.0f, "a flag without an inf, dtype %d", dtype);
    found = 0.0f;
    amp_multiply(&(struct multiply){grads, &factor, &found});
    EXPECT(found == 0.0f, "a flag of a product, dtype %d", dtype);
    for (int64_t i = 0; i < n; i++) {
        double product = dtype == 0 ? ((float *)data)[i] : wide ? ((double *)data)[i]
                                                                : value_of(((uint16_t *)data)[i], dtype);
        EXPECT(product == exact[i] * 0.25, "product %d of %d, dtype %d: %g", (int)i, (int)n, dtype, product);
    }
    if (dtype >= 2) {
        for (int64_t i = 0; i < n; i++)
            total[i] = (float)i;
        amp_add(&(struct add){grads, &total});
        for (int64_t i = 0; i < n; i++)
            EXPECT(total[i] == (float)i + (float)(exact[i] * 0.25), "sum %d of %d", (int)i, (int)n);
        ((uint16_t *)data)[n - 1] = dtype == 2 ? 0x7f80 : 0x7c00;
        amp_grad_stats(&(struct grad_stats){grads, &norm, &bad, &all, &found, 0});
        EXPECT(bad == 1.0f && isinf(all), "an inf at the end of %d is not seen, dtype %d", (int)n, dtype);
        found = 0.0f;
        amp_multiply(&(struct multiply){grads, &factor, &found});
        EXPECT(found == 1.0f, "an inf at the end of %d is not seen in a product, dtype %d", (int)n, dtype);
    }
    free(exact);
    free(data);
    free(total);
}

static uint32_t bits_at(const float *x, int64_t i) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    return bits;
}

/* The hash of amp_core.common.counter_random. */
static uint32_t random_of(uint32_t number, uint64_t key) {
    uint32_t x = (number / 2 + (uint32_t)key) * 0xed5ad4bbu;
    x = ((x ^ x / 2048) ^ (uint32_t)(key >> 32)) * 0xac4c1b51u;
    x = (x ^ x / 32768) * 0x31848babu;
    x ^= x / 16384;
    return number % 2 ? x / 65536 : x % 65536;
}

static void stored_weights(int64_t n) {
    float *x = malloc((size_t)n * sizeof *x), *back = malloc((size_t)n * sizeof *x);
    uint16_t *low = malloc((size_t)n * 2), *kept = malloc((size_t)n * 2), *nearest = malloc((size_t)n * 2);
    int32_t *numbers = malloc((size_t)n * sizeof *numbers);
    const uint64_t key = 0xfedcba9876543210u;
    for (int64_t i = 0; i < n; i++) {
        x[i] = ((float)((i * 2654435761u) % 65521) - 30000.5f) / 77.0f;
        numbers[i] = (int32_t)(i + 12345);
    }
    x[n / 2] = INFINITY;
    amp_split(x, low, kept, n, 1, 2);
    amp_join(back, low, kept, n, 1, 2);
    EXPECT(memcmp(x, back, (size_t)n * sizeof *x) == 0, "%d weights come back otherwise", (int)n);
    cast(x, 0, nearest, 2, n);
    amp_split(x, low, kept, n, 0, 2);
    amp_join(back, low, kept, n, 0, 2);
    EXPECT(memcmp(low, nearest, (size_t)n * 2) == 0, "%d weights are not rounded to nearest", (int)n);
    for (int64_t i = 0; i < n; i++)
        EXPECT(back[i] == x[i] || fabsf(back[i] - x[i]) <= fabsf(x[i]) * 0x1p-16f, "%d of %d", (int)i, (int)n);
    for (int numbered = 0; numbered < 2; numbered++) {
        amp_round(x, low, numbered ? numbers : NULL, n, key, 2);
        for (int64_t i = 0; i < n; i++) {
            uint32_t random = random_of((uint32_t)(numbered ? numbers[i] : i), key);
            uint32_t right = (bits_at(x, i) + (random + 0x8000u) % 65536) >> 16;
            EXPECT(low[i] == right, "%d of %d is rounded to %x, not %x", (int)i, (int)n, low[i], (int)right);
        }
    }
    free(x);
    free(back);
    free(low);
    free(kept);
    free(nearest);
    free(numbers);
}

/* Quantise to e4m3 in tiles; `top` is what the largest magnitude of each becomes before it is rounded. */
static void quantising(int64_t columns, int64_t height, int64_t width, float top) {
    const struct element e4m3 = {3, 0x3c800000u, 0x44000000u, 0x7e, 7, 0x7f, 448.0f};
    const struct tiles tiles = {1, 7, columns, height, width};
    int64_t n = 7 * columns, across = parts(columns, width), scales = parts(7, height) * across;
    int64_t found[2], counts[2], expected[4] = {0, 0, 0, 0};
    float *x = malloc((size_t)n * 4), *amax = malloc((size_t)scales * 4), *values = malloc((size_t)n * 4);
    float *encode = malloc((size_t)scales * 4);
    uint8_t *codes = malloc((size_t)n);
    for (int64_t i = 0; i < n; i++)
        x[i] = ldexpf((float)(i * 7919 % 2048 - 1024), (int)(i % 25) - 12);
    x[n - 1] = INFINITY;
    x[0] = NAN;
    amp_quantize_largest(x, 0, &tiles, amax, found, 2);
    EXPECT(found[0] == 1 && found[1] == 1, "inf and NaN were counted %d and %d times", (int)found[0],
           (int)found[1]);
    for (int64_t i = 0; i < scales; i++)
        encode[i] = isfinite(amax[i]) ? (amax[i] > 0.0f ? top / amax[i] : 1.0f) : NAN;
    amp_quantize_round(x, 0, &tiles, encode, 0, top <= 448.0f, &e4m3, NULL, NULL, values, 0, counts, 2);
    amp_quantize_round(x, 0, &tiles, encode, 0, top <= 448.0f, &e4m3, NULL, NULL, codes, 1, found, 2);
    for (int64_t i = 0; i < n; i++) {
        int64_t tile = i / columns / height * across + i % columns / width;
        int exponent;
        float scaled = x[i] * encode[tile];
        EXPECT(!(fabsf(x[i]) > amax[tile]), "element %d is above the largest", (int)i);
        if (isnan(encode[tile])) {
            EXPECT(isnan(values[i]) && codes[i] == 0x7f, "element %d is not NaN", (int)i);
            continue;
        }
        frexpf(scaled, &exponent);
        exponent = exponent < -5 ? -9 : exponent - 4;
        double rounded = ldexp(nearbyint(ldexp((double)scaled, -exponent)), exponent);
        expected[2] += fabs(rounded) > 448.0;
        rounded = fmin(fmax(rounded, -448.0), 448.0);
        expected[3] += rounded == 0.0 && x[i] != 0.0f;
        EXPECT((double)values[i] == rounded, "%g became %g", (double)scaled, (double)values[i]);
        double steps = codes[i] & 0x78 ? ldexp((codes[i] & 7) + 8, (codes[i] >> 3 & 15) - 1) : codes[i] & 7;
        steps = ldexp(codes[i] & 0x80 ? -steps : steps, -9);
        EXPECT(steps == rounded, "%g has the code of %g", (double)scaled, steps);
    }
    EXPECT(counts[0] == expected[2] && counts[1] == expected[3], "other counts");
    EXPECT(counts[0] == found[0] && counts[1] == found[1], "codes are counted otherwise");
    free(x), free(amax), free(values), free(encode), free(codes);
}

/* Scales in e8m0 and e4m3: floats, and codes that stand for them. */
static void scaling(int64_t n) {
    const struct scaling e8m0 = {2, 448.0f, 8}, e4m3 = {4, 6.0f, 2};
    const float outer = 0.75f;
    float *amax = malloc((size_t)n * 4), *encode = malloc((size_t)n * 4), *scale = malloc((size_t)n * 4);
    uint8_t *codes = malloc((size_t)n);
    for (int64_t i = 0; i < n; i++)
        amax[i] = ldexpf((float)(i * 7919 % 2048 + 1), (int)(i % 40) - 20);
    amax[0] = NAN;
    for (int kind = 0; kind < 2; kind++) {
        const struct scaling *to = kind ? &e4m3 : &e8m0;
        amp_quantize_scales(amax, amax, n, to, &outer, encode, scale, 0, 2);
        amp_quantize_scales(amax, amax, n, to, &outer, encode, codes, 1, 2);
        EXPECT(isnan(scale[0]) && isnan(encode[0]) && codes[0] == (kind ? 0x7f : 0xff), "NaN has a scale");
        for (int64_t i = 1; i < n; i++) {
            int exponent;
            double wanted, code;
            if (kind) {
                float x = amax[i] / 6.0f / outer;
                frexpf(x, &exponent);
                exponent = exponent < -5 ? -9 : exponent - 4;
                wanted = ldexp(nearbyint(ldexp((double)x, -exponent)), exponent);
                wanted = fmin(fmax(wanted, ldexp(1.0, -9)), 448.0);
                code = codes[i] & 0x78 ? ldexp((codes[i] & 7) + 8, (codes[i] >> 3) - 1) : codes[i];
                code = ldexp(code, -9);
            } else {
                frexpf(amax[i], &exponent);
                wanted = ldexp(1.0, exponent - 9);
                code = ldexp(1.0, codes[i] - 127);
                EXPECT(encode[i] * scale[i] == 1.0f, "%g is encoded by %g", (double)scale[i], (double)encode[i]);
            }
            EXPECT((double)scale[i] == wanted, "%g has the scale %g", (double)amax[i], (double)scale[i]);
            EXPECT(code == wanted, "%g has the code of %g", wanted, code);
        }
    }
    free(amax), free(encode), free(scale), free(codes);
}

static void everything(void) {
    const int64_t lengths[] = {1, 3, 4, 7, 8, 9, 31, 33, 511, 513, 4097, 32769, 70001};
    for (int dtype = 2; dtype < 4; dtype++)
        every_half(dtype);
    for (int dtype = 0; dtype < 4; dtype++)
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
            norms_products_sums(dtype, lengths[i]);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        stored_weights(lengths[i]);
        for (float top = 448.0f; top <= 512.0f; top += 64.0f) {
            quantising(lengths[i], 1, 32, top);
            quantising(lengths[i], 3, 1, top);
            quantising(lengths[i], 2, 5000, top);
            quantising(lengths[i], 1, 16, top);
        }
        scaling(lengths[i]);
    }
}

int main(void) {
    const char *before = "";
    amp_start();
    for (int limit = 2; limit >= -1; limit--) {
        amp_limit(limit);
        if (strcmp(amp_instruction_set(), before) == 0)
            continue;
        before = amp_instruction_set();
        everything();
        printf("%s: %d failures\n", before, failures);
    }
    return failures != 0;
}
