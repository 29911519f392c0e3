/* Kernels of the AVX-512 table that live in files of their own. Not installed. */
#ifndef GLM53_EXL3_AVX512_H
#define GLM53_EXL3_AVX512_H

#include "internal.h"

void glm53_avx512_plan(int32_t bits_x2, void *plan);
void glm53_avx512_multiply_exact(const glm53_rect *rect);
void glm53_avx512_multiply_fast(const glm53_rect *rect);
void glm53_avx512_decode_block(const glm53_matrix *matrix, int32_t b, float *w);

#endif
