/* What the native tests share: a check that ends the program, buffers of exact size, and random numbers. */
#ifndef GLM53_CHECK_H
#define GLM53_CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "glm53_kernels.h"

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

/* Exactly `count` items, so that the sanitizer sees the first access beyond them. */
static inline void *items(size_t count, size_t size) {
    void *memory = malloc(count * size);
    CHECK(memory);
    return memory;
}

static inline uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static inline float *random_floats(uint32_t *seed, size_t count) {
    float *x = items(count, sizeof *x);
    for (size_t i = 0; i < count; i++) x[i] = (float)next_random(seed) / 8388608.0f - 1.0f;
    return x;
}

static inline float *nan_floats(size_t count) {
    float *x = items(count, sizeof *x);
    for (size_t i = 0; i < count; i++) x[i] = NAN;
    return x;
}

/* f16 numbers of magnitude 0.5 to 1, either sign. */
static inline uint16_t *random_scales(uint32_t *seed, size_t count) {
    uint16_t *h = items(count, sizeof *h);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = next_random(seed);
        h[i] = (uint16_t)((bits & 0x8000u) | 0x3800u | (bits & 0x3ffu));
    }
    return h;
}

/* Relative RMS difference; NaN if either holds one. */
static inline double difference(const float *a, const float *b, size_t count) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(error / norm);
}

static inline glm53_matrix random_matrix(uint32_t *seed, int32_t in, int32_t out, int32_t bits_x2,
                                         int32_t codebook) {
    size_t halves = (size_t)(in / 16) * (size_t)(out / 16) * 8 * (size_t)bits_x2;
    uint16_t *trellis = items(halves, sizeof *trellis);
    for (size_t i = 0; i < halves; i++) trellis[i] = (uint16_t)next_random(seed);
    return (glm53_matrix){
        .trellis = trellis,
        .suh = random_scales(seed, (size_t)in),
        .svh = random_scales(seed, (size_t)out),
        .bias = random_scales(seed, (size_t)out),
        .in_features = in,
        .out_features = out,
        .bits_x2 = bits_x2,
        .codebook = codebook,
    };
}

static inline void free_matrix(glm53_matrix *matrix) {
    free((void *)(uintptr_t)matrix->trellis);
    free((void *)(uintptr_t)matrix->suh);
    free((void *)(uintptr_t)matrix->svh);
    free((void *)(uintptr_t)matrix->bias);
}

static inline glm53_pool *make_pool(int32_t num_threads, int32_t isa) {
    glm53_pool_config config = {.num_threads = num_threads, .isa = isa};
    glm53_pool *pool;
    CHECK(glm53_pool_create(&config, &pool) == GLM53_OK);
    return pool;
}

#endif
