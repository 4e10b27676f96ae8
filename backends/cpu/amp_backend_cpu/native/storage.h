/* What storage.c needs of kernels.c. */
#include <stddef.h>
#include <stdint.h>

int amp_level(void);      /* the instruction set in use: 2 AVX-512, 1 AVX2, else less */
int amp_may_thread(void); /* 0 after a fork */
