/* Lets FlashAttention-2 take a Hopper GPU for one with less shared memory, for attention.py --fa2.
 *
 *     cc -shared -fPIC -O2 -o smaller_gpu.so smaller_gpu.c -ldl
 *     LD_PRELOAD=./smaller_gpu.so SMALLER_GPU="8 6 101376 102400" python ...
 *
 * The four numbers: compute capability, and the bytes of shared memory of a thread block and of a
 * multiprocessor. FlashAttention-2 chooses its tiles by them. Its launches then request more than
 * they use, so that no more thread blocks share a multiprocessor than on the other GPU, as those of
 * packax do (Arch.asked in csrc/aot/archs.py). Kernels with at most 48 KiB are left as they are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAJOR = 75, MINOR = 76, MULTIPROCESSOR = 81, BLOCK = 97 }; /* cudaDeviceAttr */
enum { MAX_DYNAMIC = 8 };                                         /* cudaFuncAttribute */
enum { HOPPER = 228 << 10, LARGEST = 227 << 10, RESERVED = 1 << 10, ALWAYS = 48 << 10 };

typedef struct {
  unsigned x, y, z;
} Dim3;

static int other[4];

__attribute__((constructor)) static void read_environment(void) {
  const char* text = getenv("SMALLER_GPU");
  if (text == NULL ||
      sscanf(text, "%d %d %d %d", &other[0], &other[1], &other[2], &other[3]) != 4) {
    fputs("smaller_gpu: SMALLER_GPU must hold four numbers\n", stderr);
    exit(2);
  }
}

static void* next(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  for (int version = 13; found == NULL && version >= 12; --version) {
    char file[24];
    snprintf(file, sizeof file, "libcudart.so.%d", version);
    void* library = dlopen(file, RTLD_LAZY | RTLD_NOLOAD);
    if (library != NULL) found = dlsym(library, name);
  }
  if (found == NULL) abort();
  return found;
}

static size_t asked(size_t used) {
  if (used <= ALWAYS) return used;
  size_t blocks = (size_t)other[3] / (used + RESERVED);
  size_t whole = HOPPER / (blocks > 0 ? blocks : 1) - RESERVED;
  if (whole > LARGEST) whole = LARGEST;
  return whole > used ? whole : used;
}

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  static int (*real)(int*, int, int);
  if (real == NULL) real = (int (*)(int*, int, int))next("cudaDeviceGetAttribute");
  int status = real(value, attribute, device);
  if (status != 0) return status;
  if (attribute == MAJOR) *value = other[0];
  if (attribute == MINOR) *value = other[1];
  if (attribute == BLOCK) *value = other[2];
  if (attribute == MULTIPROCESSOR) *value = other[3];
  return status;
}

int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  static int (*real)(const void*, int, int);
  if (real == NULL) real = (int (*)(const void*, int, int))next("cudaFuncSetAttribute");
  return real(function, attribute, attribute == MAX_DYNAMIC ? (int)asked((size_t)value) : value);
}

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t bytes, void* stream) {
  static unsigned (*real)(Dim3, Dim3, size_t, void*);
  if (real == NULL)
    real = (unsigned (*)(Dim3, Dim3, size_t, void*))next("__cudaPushCallConfiguration");
  return real(grid, block, asked(bytes), stream);
}
