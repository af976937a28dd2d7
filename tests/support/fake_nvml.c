/* NVML without a GPU: two devices and more, as the file that FAKE_NVML names has it. It is read again every 20 ms, as
 * reading it with each call would cost more than the calls.
 *
 * Its lines: "devices N"; "mig I", the device I is divided into two partitions; "lost I", it is gone; "missing NAME", the
 * function NAME is not supported by any device; "hang NAME", it never returns ("hang all": none does). With -DOLD the
 * library lacks what drivers before 510 lack.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT = 7, LOST = 15 };
typedef unsigned long long big;
/* Partition 0 is the whole device; taken is how many samples were taken of it. */
typedef struct { int index, partition; big taken; } device;

static device devices[8][3];

static big milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

static int setting(const char *key, const char *value) {
  static char text[4096];
  static big read_at;
  char line[160];
  if (milliseconds() >= read_at + 20) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    text[0] = '\n';
    text[file ? 1 + fread(text + 1, 1, sizeof text - 2, file) : 1] = 0;
    if (file) fclose(file);
    read_at = milliseconds();
  }
  snprintf(line, sizeof line, "\n%s %s\n", key, value);
  return strstr(text, line) != NULL;
}

static int setting_of(const char *key, int number) {
  char text[16];
  snprintf(text, sizeof text, "%d", number);
  return setting(key, text);
}

/* What a call of this name begins with; of no device in particular where it is NULL. */
static int begun(const char *name, const device *which) {
  while (setting("hang", name) || setting("hang", "all")) sleep(1);
  if (which && setting_of("lost", which->index)) return LOST;
  return setting("missing", name) ? NOT_SUPPORTED : SUCCESS;
}

#define BEGIN(which) int begin = begun(__func__, which); if (begin) return begin
#define WHOLE(which) BEGIN(which); if ((which)->partition) return NOT_SUPPORTED

int nvmlInitWithFlags(unsigned flags) { BEGIN(NULL); return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error of the fake"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  BEGIN(NULL);
  *count = 2;
  for (int number = 0; number <= 8; number++) if (setting_of("devices", number)) *count = number;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **which) {
  for (int part = 0; part < 3; part++) devices[index][part] = (device){index, part, 0};
  *which = &devices[index][0];
  BEGIN(*which);
  return SUCCESS;
}

int nvmlDeviceGetUUID(device *which, char *text, unsigned length) {
  BEGIN(which);
  if (which->partition) snprintf(text, length, "MIG-%d%d000000-0000", which->index, which->partition);
  else snprintf(text, length, "GPU-%d0000000-0000", which->index);
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device **which) {
  char text[64];
  for (int index = 0; index < 8; index++) {
    nvmlDeviceGetUUID(&(device){index, 0, 0}, text, sizeof text);
    if (!strcmp(text, uuid)) return nvmlDeviceGetHandleByIndex_v2(index, which);
  }
  return NOT_FOUND;
}

int nvmlDeviceGetName(device *which, char *text, unsigned length) {
  BEGIN(which);
  snprintf(text, length, which->partition ? "Fake 100 MIG 1g.10gb" : "Fake 100");
  return SUCCESS;
}

typedef struct { big total, free, used; } memory;
int nvmlDeviceGetMemoryInfo(device *which, memory *info) {
  BEGIN(which);
  *info = (memory){80000000000ull, 60000000000ull, 20000000000ull};
  if (which->partition) *info = (memory){10000000000ull, 7000000000ull, 3000000000ull};
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device *which, unsigned rates[2]) {
  WHOLE(which);
  rates[0] = 60 + which->index;
  rates[1] = 10;
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(device *which, unsigned *milliwatts) { WHOLE(which); *milliwatts = 100000; return SUCCESS; }

int nvmlDeviceGetTotalEnergyConsumption(device *which, big *millijoules) {
  WHOLE(which);
  *millijoules = milliseconds() * 100;
  return SUCCESS;
}

int nvmlDeviceGetTemperature(device *which, int sensor, unsigned *degrees) { WHOLE(which); *degrees = 55; return SUCCESS; }
int nvmlDeviceGetClockInfo(device *which, int clock, unsigned *megahertz) { WHOLE(which); *megahertz = 1410; return SUCCESS; }

/* Idle (which is no reason), a power cap and a hot device. */
static int reasons(big *bits) { *bits = 0x1 | 0x4 | 0x40; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(device *which, big *bits) { WHOLE(which); return reasons(bits); }

int nvmlDeviceGetMigMode(device *which, unsigned *now, unsigned *then) {
  BEGIN(which);
  *now = *then = setting_of("mig", which->index);
  return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device *which, unsigned *count) { BEGIN(which); *count = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(device *which, unsigned number, device **part) {
  BEGIN(which);
  if (number != 0 && number != 3) return NOT_FOUND;
  *part = &devices[which->index][number ? 2 : 1];
  return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(device *which, unsigned *id) { BEGIN(which); *id = which->partition + 6; return SUCCESS; }

#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(device *which, big *bits) { WHOLE(which); return reasons(bits); }

typedef struct { unsigned version; big total, reserved, free, used; } memory_v2;
int nvmlDeviceGetMemoryInfo_v2(device *which, memory_v2 *info) {
  BEGIN(which);
  memory plain;
  int code = nvmlDeviceGetMemoryInfo(which, &plain);
  *info = (memory_v2){info->version, plain.total, 500000000, plain.free, plain.used - 500000000};
  return code;
}

typedef struct { unsigned version, supported; } support;
int nvmlGpmQueryDeviceSupport(device *which, support *found) { BEGIN(which); found->supported = 1; return SUCCESS; }
int nvmlGpmSampleAlloc(big **sample) { *sample = calloc(2, sizeof(big)); return SUCCESS; }

/* A sample knows of what it was taken, and which of its samples it is. */
static int take(big *sample, device *which) {
  sample[0] = ++which->taken;
  sample[1] = which->partition;
  return SUCCESS;
}
int nvmlGpmSampleGet(device *which, big *sample) { WHOLE(which); return take(sample, which); }
int nvmlGpmMigSampleGet(device *which, unsigned instance, big *sample) {
  WHOLE(which);
  return take(sample, &devices[which->index][instance - 6]);
}

typedef struct { unsigned id; int code; double value; char *names[3]; } metric;
typedef struct { unsigned version, count; big *first, *second; metric metrics[1]; } metrics;
int nvmlGpmMetricsGet(metrics *asked) {
  BEGIN(NULL);
  /* Between one sample of a thing and the next. */
  if (asked->second[0] != asked->first[0] + 1 || asked->first[1] != asked->second[1]) return INVALID;
  if (asked->first[0] == 0 || asked->metrics[0].id != 2) return INVALID;
  asked->metrics[0].code = SUCCESS;
  asked->metrics[0].value = 30.0 + asked->second[1];
  return SUCCESS;
}

typedef struct { unsigned field, scope; long long at, latency; int type, code; big value; } field;
int nvmlDeviceGetFieldValues(device *which, int count, field *values) {
  WHOLE(which);
  for (int at = 0; at < count; at++) {
    values[at].type = 3;
    values[at].code = SUCCESS;
    values[at].value = values[at].field * 1000ull;
    if (values[at].field == 139) values[at].code = NOT_SUPPORTED;
    if (values[at].field == 138 && values[at].scope != ~0u) values[at].code = INVALID;
  }
  return SUCCESS;
}

typedef struct { unsigned pid; big memory; unsigned instance, compute; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(device *which, unsigned *count, process *found) {
  BEGIN(which);
  if (!found) { *count = 1; return INSUFFICIENT; }
  *count = 1;
  found[0] = (process){4242, 1000000000, ~0u, ~0u};
  return SUCCESS;
}
#endif
