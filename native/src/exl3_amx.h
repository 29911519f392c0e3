/* Kernels of the AMX table that live in files of their own. Not installed. */
#ifndef GLM53_EXL3_AMX_H
#define GLM53_EXL3_AMX_H

#include "internal.h"

void glm53_amx_plan(int32_t bits_x2, void *plan);
void glm53_amx_multiply_fast(const glm53_rect *rect);

#endif
