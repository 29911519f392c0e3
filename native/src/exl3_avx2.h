/* Kernels of the AVX2 table that live in files of their own, and those that the AVX-512 table borrows. Not
 * installed. */
#ifndef GLM53_EXL3_AVX2_H
#define GLM53_EXL3_AVX2_H

#include "dense.h"
#include "internal.h"

void glm53_avx2_plan(int32_t bits_x2, void *plan);
void glm53_avx2_multiply_exact(const glm53_rect *rect);
void glm53_avx2_multiply_fast(const glm53_rect *rect);
void glm53_avx2_decode_block(const glm53_matrix *matrix, int32_t b, float *w);

bool glm53_avx2_has_fast16(const glm53_matrix *matrix);
void glm53_avx2_hadamard(const float *x, float *y);
void glm53_avx2_finish(const float *parts, int32_t num_parts, size_t stride, const uint16_t *svh,
                       const uint16_t *bias, float *y);
void glm53_avx2_activate(const float *gate, const float *up, float limit, int32_t clamp, float *a);
void glm53_avx2_add_scaled(float *y, const float *x, float scale, int32_t n);
void glm53_avx2_widen(const uint16_t *h, int32_t n, float *x);
/* prepare, with the activations in the order of the AVX-512 products: EXACT32 as they are; FAST16 each
 * k-tile's rows 0, 8, 1, 9, ... 7, 15. The numbers are those of AVX2, bit for bit. */
void glm53_avx2_prepare_for_avx512(const float *x, const uint16_t *suh, int32_t precision, float *block);

#endif
