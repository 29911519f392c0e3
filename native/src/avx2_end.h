/* See avx2_begin.h. */
#undef INLINE

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
