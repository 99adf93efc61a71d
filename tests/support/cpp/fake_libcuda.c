/* A fake libcuda.so.1, for tests without a GPU: the functions that csrc/runtime/driver.cc uses.
 *
 * It records launches with the values of their parameters, counts calls, fails on request, and
 * rejects what the real driver would reject: a thread without a context, a function of another
 * context, too much shared memory. Tests control it by the fake_* functions. With -DFAKE_OLD it is
 * a driver older than cuLibraryLoadData. */

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotInitialized = 3,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kMaxDevices = 4,
  kMaxFailures = 8,
  kMaxKernels = 128,
  kNone = -1,
  kMultiprocessors = 10,
};

typedef struct Context {
  uint64_t id;
  int device;
} Context;
typedef struct Library {
  const void* code;
} Library;
typedef struct Kernel {
  Library* library;
  char name[64];
  int shared[kMaxDevices];
} Kernel;
/* What the fake cuTensorMapEncodeTiled writes into the 128 bytes of a map: its arguments. */
typedef struct Map {
  uint64_t address;
  uint64_t flags; /* the word whose bit 21 old drivers set; all bits are set here */
  uint64_t sizes[4];
  uint64_t strides[3];
  uint32_t box[4];
  uint32_t steps[4];
  uint8_t type, interleave, swizzle, promotion, fill;
} Map;
typedef struct Function {
  Kernel* kernel;
  uint64_t context;
} Function;

/* Not a mutex: every call would take it, and ThreadSanitizer would infer from it that the callers'
 * threads are ordered. */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static void lock(void) {
  while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) sched_yield();
}
static void unlock(void) { atomic_flag_clear_explicit(&busy, memory_order_release); }

static struct {
  char name[64];
  int cc;
  int shared_limit;
  Context context;
} devices[kMaxDevices];
static int device_count;
static uint64_t next_context = 1;
static struct {
  char function[64];
  int code, times;
} failures[kMaxFailures];
static struct {
  char function[64];
  int count;
} calls[64];
static struct {
  char kernel[64];
  char types[64];
} layouts[kMaxKernels];
static int version =
#ifdef FAKE_OLD
    11080;
#else
    12040;
#endif
static char* record;
static size_t record_size, record_room;
static __thread int current = 0;

/* ---- control by tests ---- */

void fake_add_device(const char* name, int cc, int shared_limit) {
  if (device_count == kMaxDevices) {
    fprintf(stderr, "fake_add_device: there is room for %d devices\n", kMaxDevices);
    abort();
  }
  snprintf(devices[device_count].name, sizeof devices[0].name, "%s", name);
  devices[device_count].cc = cc;
  devices[device_count].shared_limit = shared_limit;
  devices[device_count].context.device = device_count;
  devices[device_count].context.id = next_context++;
  ++device_count;
}

/* Makes the context of `device` current in the calling thread; kNone: no context. */
void fake_set_current(int device) { current = device; }

/* As cuDevicePrimaryCtxReset does: another context at the same address. */
void fake_new_context(int device) { devices[device].context.id = next_context++; }

void fake_set_version(int value) { version = value; }

static int multiprocessors = kMultiprocessors;
// Call it before the device is first used.
void fake_set_multiprocessors(int value) { multiprocessors = value; }

/* The next `times` calls of `function` return `code`. */
void fake_fail_times(const char* function, int code, int times) {
  int i = 0;
  while (i < kMaxFailures - 1 && failures[i].function[0] && strcmp(failures[i].function, function))
    ++i;
  snprintf(failures[i].function, sizeof failures[i].function, "%s", function);
  failures[i].code = code;
  failures[i].times = times;
}

/* All further calls of `function` return `code`; 0: they succeed. */
void fake_fail(const char* function, int code) { fake_fail_times(function, code, 1 << 30); }

/* `types`: one letter per parameter, p(ointer) i(nt32) f(loat) t(ensor map: seven parameters),
 * including the two scratch pointers. */
void fake_set_layout(const char* kernel, const char* types) {
  int i = 0;
  while (i < kMaxKernels && layouts[i].kernel[0] && strcmp(layouts[i].kernel, kernel)) ++i;
  if (i == kMaxKernels) abort();  // raise kMaxKernels
  snprintf(layouts[i].kernel, sizeof layouts[i].kernel, "%s", kernel);
  snprintf(layouts[i].types, sizeof layouts[i].types, "%s", types);
}

int fake_calls(const char* function) {
  for (int i = 0; i < 64 && calls[i].function[0]; ++i) {
    if (!strcmp(calls[i].function, function)) return calls[i].count;
  }
  return 0;
}

/* All launches and memsets so far, one JSON object per line. */
const char* fake_record(void) { return record ? record : ""; }

void fake_clear(void) {
  free(record);
  record = NULL;
  record_size = record_room = 0;
  memset(calls, 0, sizeof calls);
  memset(failures, 0, sizeof failures);
}

static void write_text(const char* text) {
  size_t n = strlen(text);
  if (record_size + n + 1 > record_room) {
    record_room = 2 * (record_size + n + 1);
    record = realloc(record, record_room);
  }
  memcpy(record + record_size, text, n + 1);
  record_size += n;
}

static int enter(const char* function) {
  int code = kSuccess, i = 0;
  lock();
  while (i < 63 && calls[i].function[0] && strcmp(calls[i].function, function)) ++i;
  snprintf(calls[i].function, sizeof calls[i].function, "%s", function);
  ++calls[i].count;
  for (int j = 0; j < kMaxFailures; ++j) {
    if (!strcmp(failures[j].function, function) && failures[j].times > 0) {
      --failures[j].times;
      code = failures[j].code;
    }
  }
  unlock();
  return code;
}

#define ENTER()                          \
  do {                                   \
    int code_ = enter(__func__);         \
    if (code_ != kSuccess) return code_; \
  } while (0)

/* ---- the driver ---- */

int cuInit(unsigned flags) {
  ENTER();
  return flags ? kInvalidValue : kSuccess;
}

int cuDriverGetVersion(int* out) {
  ENTER();
  *out = version;
  return kSuccess;
}

int cuGetErrorName(int code, const char** name) {
  *name = code == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE"
          : code == 209         ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
                                : NULL;
  return *name ? kSuccess : kInvalidValue;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == kInvalidValue ? "invalid argument"
          : code == 209         ? "no kernel image is available"
                                : NULL;
  return *text ? kSuccess : kInvalidValue;
}

int cuDeviceGetCount(int* count) {
  ENTER();
  *count = device_count;
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  ENTER();
  *device = ordinal;
  return ordinal < device_count ? kSuccess : kInvalidValue;
}

int cuDeviceGetName(char* name, int size, int device) {
  ENTER();
  snprintf(name, (size_t)size, "%s", devices[device].name);
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER();
  if (attribute == 16) return *value = multiprocessors, kSuccess;
  if (attribute != 75 && attribute != 76) return kInvalidValue;
  *value = attribute == 75 ? devices[device].cc / 10 : devices[device].cc % 10;
  return kSuccess;
}

int cuCtxGetCurrent(void** context) {
  ENTER();
  *context = current == kNone || current >= device_count ? NULL : &devices[current].context;
  return kSuccess;
}

int cuCtxGetDevice(int* device) {
  ENTER();
  if (current == kNone) return kInvalidContext;
  *device = current;
  return kSuccess;
}

int cuCtxGetId(Context* context, unsigned long long* id) {
  ENTER();
  *id = context->id;
  return kSuccess;
}

#ifndef FAKE_OLD
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned n, void* c,
                      void* d, unsigned m) {
  ENTER();
  if (a || b || n || c || d || m || !code || (uintptr_t)code % 64) return kInvalidValue;
  usleep(2000); /* gives another thread time to arrive */
  Library* loaded = calloc(1, sizeof *loaded);
  loaded->code = code;
  *library = loaded;
  return kSuccess;
}
#endif

int cuLibraryUnload(void* library) {
  ENTER();
  free(library);
  return kSuccess;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  ENTER();
  Kernel* found = calloc(1, sizeof *found);
  found->library = library;
  snprintf(found->name, sizeof found->name, "%s", name);
  *kernel = found;
  return kSuccess;
}

int cuKernelSetAttribute(int attribute, int value, Kernel* kernel, int device) {
  ENTER();
  if (attribute != 8 || value < 0 || value > devices[device].shared_limit) return kInvalidValue;
  kernel->shared[device] = value;
  return kSuccess;
}

int cuKernelGetFunction(void** function, Kernel* kernel) {
  ENTER();
  if (current == kNone) return kInvalidContext;
  Function* loaded = calloc(1, sizeof *loaded);
  loaded->kernel = kernel;
  loaded->context = devices[current].context.id;
  *function = loaded;
  return kSuccess;
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  ENTER();
  Map encoded = {.address = (uintptr_t)address,
                 .flags = ~0ull,
                 .type = (uint8_t)type,
                 .interleave = (uint8_t)interleave,
                 .swizzle = (uint8_t)swizzle,
                 .promotion = (uint8_t)promotion,
                 .fill = (uint8_t)fill};
  /* int32, float16, float32 or bfloat16; swizzle 3 works on rows of 128 bytes. */
  const unsigned bytes = box[0] * (type == 6 || type == 9 ? 2 : type == 3 || type == 7 ? 4 : 0);
  if (!bytes || bytes % 16 || swizzle < 0 || swizzle > 3) return kInvalidValue;
  if (swizzle && bytes > 16u << swizzle) return kInvalidValue;
  if ((uintptr_t)map % 64 || rank != 4 || encoded.address % 16) return kInvalidValue;
  for (int i = 0; i < 4; ++i) {
    if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256) return kInvalidValue;
    if (i < 3 && (strides[i] % 16 || strides[i] >= 1ull << 40)) return kInvalidValue;
    encoded.sizes[i] = sizes[i];
    if (i < 3) encoded.strides[i] = strides[i];
    encoded.box[i] = box[i];
    encoded.steps[i] = steps[i];
  }
  memset(map, 0, 128);
  memcpy(map, &encoded, sizeof encoded);
  return kSuccess;
}

int cuMemsetD32Async(unsigned long long address, unsigned value, size_t n, void* stream) {
  char text[128];
  ENTER();
  if (current == kNone || address % 4) return kInvalidValue;
  lock();
  snprintf(text, sizeof text, "{\"memset\": [%llu, %u, %llu], \"stream\": %llu}\n", address, value,
           (unsigned long long)n, (unsigned long long)(uintptr_t)stream);
  write_text(text);
  unlock();
  return kSuccess;
}

static void write_map(void** params) {
  Map m;
  int32_t shape[4];
  int64_t strides[4];
  char text[768];
  memcpy(&m, params[0], sizeof m);
  for (int i = 0; i < 4; ++i) {
    memcpy(&shape[i], params[1 + i], 4);
    memcpy(&strides[i], params[5 + i], 8);
  }
  snprintf(text, sizeof text,
           "{\"address\": %llu, \"bit21\": %d, \"sizes\": [%llu, %llu, %llu, %llu], "
           "\"byte_strides\": [%llu, %llu, %llu], \"box\": [%u, %u, %u, %u], "
           "\"steps\": [%u, %u, %u, %u], "
           "\"type\": %d, \"interleave\": %d, \"swizzle\": %d, \"promotion\": %d, \"fill\": %d, "
           "\"shape\": [%d, %d, %d, %d], \"strides\": [%lld, %lld, %lld, %lld]}",
           (unsigned long long)m.address, (int)(m.flags >> 21 & 1), (unsigned long long)m.sizes[0],
           (unsigned long long)m.sizes[1], (unsigned long long)m.sizes[2],
           (unsigned long long)m.sizes[3], (unsigned long long)m.strides[0],
           (unsigned long long)m.strides[1], (unsigned long long)m.strides[2], m.box[0], m.box[1],
           m.box[2], m.box[3], m.steps[0], m.steps[1], m.steps[2], m.steps[3], m.type, m.interleave,
           m.swizzle, m.promotion, m.fill, shape[0], shape[1], shape[2], shape[3],
           (long long)strides[0], (long long)strides[1], (long long)strides[2],
           (long long)strides[3]);
  write_text(text);
}

int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** params, void** extra) {
  ENTER();
  const char* types = NULL;
  char text[256];
  if (current == kNone || f->context != devices[current].context.id) return kInvalidHandle;
  if (!gx || !gy || !gz || !bx || gy > 65535 || gz > 65535 || extra) return kInvalidValue;
  if (shared > 49152 && (int)shared > f->kernel->shared[current]) return kInvalidValue;
  for (int i = 0; i < kMaxKernels && layouts[i].kernel[0]; ++i) {
    if (!strcmp(layouts[i].kernel, f->kernel->name)) types = layouts[i].types;
  }
  if (!types) return kNotFound;
  lock();
  snprintf(text, sizeof text,
           "{\"kernel\": \"%s\", \"device\": %d, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], "
           "\"shared\": %u, "
           "\"stream\": %llu, \"params\": [",
           f->kernel->name, current, gx, gy, gz, bx, by, bz, shared,
           (unsigned long long)(uintptr_t)stream);
  write_text(text);
  for (int i = 0; types[i]; ++i, ++params) {
    const char* separator = i ? ", " : "";
    if (types[i] == 't') {
      write_text(separator);
      write_map(params);
      params += 8;
      continue;
    }
    if (types[i] == 'p') {
      uint64_t v;
      memcpy(&v, params[0], 8);
      snprintf(text, sizeof text, "%s%llu", separator, (unsigned long long)v);
    } else if (types[i] == 'f') {
      float v;
      memcpy(&v, params[0], 4);
      snprintf(text, sizeof text, "%s%.9g", separator, (double)v);
    } else {
      int32_t v;
      memcpy(&v, params[0], 4);
      snprintf(text, sizeof text, "%s%d", separator, v);
    }
    write_text(text);
  }
  write_text("]}\n");
  unlock();
  return kSuccess;
}
