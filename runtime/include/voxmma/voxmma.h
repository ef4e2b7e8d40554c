/* libvoxmma: runs engines of voxmma without Python. docs/runtime.md shows how.
 *
 * An engine is a network from coordinates to result, compiled by voxmma.engine.compile and written by
 * voxmma.engine.save. The library reads the file, takes memory once, and runs frames: on a GPU on the caller's stream,
 * without waiting for the device.
 *
 * Functions return a vxm_code; what went wrong is told by vxm_last_error() of the same thread. No exception leaves them.
 * Pointers are not to be null unless it says so. Structs that are filled by the caller begin with their size, which
 * their _init function sets: later versions append members.
 *
 * Threads: calls on one engine take turns, calls on several engines run side by side. What vxm_engine_output gives
 * belongs to the engine and is overwritten by its next frame.
 */
#ifndef VOXMMA_VOXMMA_H
#define VOXMMA_VOXMMA_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#ifdef VXM_BUILD
#define VXM_API __declspec(dllexport)
#else
#define VXM_API __declspec(dllimport)
#endif
#else
#define VXM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header. Programs that were built with one major version run with later libraries of the same. */
#define VXM_VERSION_MAJOR 1
#define VXM_VERSION_MINOR 0

enum { VXM_MAX_DIMS = 8 };

typedef enum vxm_code {
  VXM_OK = 0,
  /* calls */
  VXM_ERROR_ARGUMENT = 1,    /* an argument that cannot be */
  VXM_ERROR_IO = 2,          /* the file cannot be read */
  VXM_ERROR_FORMAT = 3,      /* no engine, a damaged one, or a program that makes no sense */
  VXM_ERROR_VERSION = 4,     /* of another version of voxmma or of the file format */
  VXM_ERROR_DEVICE = 5,      /* for another card, or there is none, or the library has no code for it */
  VXM_ERROR_UNSUPPORTED = 6, /* the program has an operator that this runtime does not have */
  VXM_ERROR_MEMORY = 7,      /* out of memory, on the host or the device */
  VXM_ERROR_CUDA = 8,        /* CUDA failed */
  VXM_ERROR_INTERNAL = 9,
  /* frames, told by vxm_engine_status */
  VXM_FRAME_BOUNDS = 20,    /* coordinates outside of the engine's bounds */
  VXM_FRAME_DUPLICATE = 21, /* a voxel twice */
  VXM_FRAME_CAPACITY = 22,  /* a level has more voxels than its capacity, or a kernel map more than its room */
  VXM_FRAME_DENSE = 23,     /* a voxel outside of the dense grid */
  VXM_FRAME_FINITE = 24,    /* features that are not finite */
  VXM_FRAME_POINTS = 25     /* points not finite, outside of the bounds or of no sample; too many in one voxel */
} vxm_code;

typedef enum vxm_dtype {
  VXM_FLOAT16 = 0,
  VXM_BFLOAT16 = 1,
  VXM_FLOAT32 = 2,
  VXM_FLOAT64 = 3,
  VXM_INT32 = 4,
  VXM_INT64 = 5,
  VXM_UINT8 = 6
} vxm_dtype;

/* Points are an input in place of voxels: the engine makes these. */
typedef enum vxm_kind { VXM_VOXELS = 0, VXM_TENSOR = 1, VXM_POINTS = 2 } vxm_kind;

typedef struct vxm_engine vxm_engine;

/* Memory on the engine's device: GPU memory, or the host's for a CPU engine. 256-byte aligned. */
typedef struct vxm_allocator {
  void* context;
  void* (*allocate)(void* context, size_t bytes); /* null: there is none */
  void (*release)(void* context, void* memory);   /* when the engine is freed, or its load failed */
} vxm_allocator;

typedef struct vxm_options {
  size_t size;
  int device;              /* number of the GPU; for a CPU engine 0 */
  int graph;               /* not 0, the default: on a GPU a frame is one CUDA graph */
  vxm_allocator allocator; /* without functions, the default: cudaMalloc, malloc */
} vxm_options;

typedef struct vxm_input_info {
  vxm_kind kind;
  vxm_dtype dtype;             /* of features or tensor */
  int32_t dims;                /* voxels, points: 2, (capacity, channels) */
  int64_t shape[VXM_MAX_DIMS]; /* voxels, points: shape[0] is the most rows that a frame may have */
  int32_t samples;             /* voxels, points: samples are 0 .. samples - 1 */
  int32_t low[4], high[4];     /* voxels: smallest and largest (batch, x, y, z) */
  int32_t stride[3];           /* voxels: tensor stride */
  vxm_dtype point_dtype;       /* points: of positions */
} vxm_input_info;

typedef struct vxm_output_info {
  vxm_kind kind;
  vxm_dtype dtype;
  int32_t dims;
  int64_t shape[VXM_MAX_DIMS]; /* shape[0] is a capacity where level >= 0 */
  int32_t level;               /* whose rows the first dimension has; -1: none's */
  int32_t stride[3];           /* voxels: tensor stride */
} vxm_output_info;

typedef struct vxm_engine_info {
  int32_t inputs, outputs, levels;
  int32_t cuda;   /* 0: runs on the CPU */
  int32_t device; /* number of the GPU */
  size_t memory;  /* bytes on the device */
} vxm_engine_info;

/* What a frame gives in place of an input. Memory of the engine's device or of the host; contiguous. It is read by work
 * that is enqueued on the stream: it may be reused when that is done. */
typedef struct vxm_input {
  const void* where;      /* voxels: int32 (rows, 4) batch, x, y, z, distinct; points: (rows, 3) positions */
  const void* data;       /* voxels, points: (rows, channels) features; tensor: its values */
  int64_t rows;           /* voxels, points: 0 .. capacity */
  const int64_t* samples; /* points: (rows) sample of each, or null: all of sample 0 */
  const int64_t* count;   /* how many of the rows there are, where the device alone knows it; or null: all */
} vxm_input;

/* A result, on the engine's device. Rows from *rows on mean nothing. */
typedef struct vxm_output {
  const void* data;              /* features or tensor */
  const int32_t* coords;         /* voxels: (capacity, 4); tensor: null */
  int64_t strides[VXM_MAX_DIMS]; /* of data, in elements */
  const int64_t* rows;           /* on the device: rows that there are; null where level is -1 */
} vxm_output;

/* What was wrong with a frame. Members that say nothing are -1. */
typedef struct vxm_frame {
  vxm_code code;
  int32_t level, map; /* numbers as in Engine.levels(), of the kernel map in order of the program */
  int64_t row, twin;  /* of the input */
  int64_t needed, capacity;
} vxm_frame;

VXM_API int vxm_version(void);                    /* VXM_VERSION_MAJOR * 1000 + VXM_VERSION_MINOR of the library */
VXM_API const char* vxm_voxmma_version(void);     /* of voxmma: engines of this version are read */
VXM_API int vxm_has_cuda(void);                   /* not 0: the library was built with CUDA kernels */
VXM_API const char* vxm_last_error(void);         /* of this thread's last call that failed; never null */
VXM_API const char* vxm_code_name(vxm_code code); /* "VXM_OK", ... */

VXM_API void vxm_options_init(vxm_options* options);

/* Reads an engine and takes all memory that it will ever use. options may be null. On failure *engine is null. */
VXM_API vxm_code vxm_engine_load(const char* path, const vxm_options* options, vxm_engine** engine);
VXM_API void vxm_engine_free(vxm_engine* engine); /* waits for its frames; null is let pass */

VXM_API vxm_code vxm_engine_get_info(const vxm_engine* engine, vxm_engine_info* info);
VXM_API vxm_code vxm_engine_input(const vxm_engine* engine, int32_t i, vxm_input_info* info);
VXM_API vxm_code vxm_engine_output_info(const vxm_engine* engine, int32_t i, vxm_output_info* info);

/* Runs a frame. On a GPU it is enqueued on `stream` (a cudaStream_t that is not being captured; null: the default stream)
 * and nothing is waited for; frames of an engine run in the order of the calls, also on different streams. On a CPU
 * `stream` is null, and the frame is done when the call returns. inputs: as many as the engine has, in the network's order. */
VXM_API vxm_code vxm_engine_run(vxm_engine* engine, const vxm_input* inputs, int32_t count, void* stream);

/* Result i of the last frame; pointers are the same for every frame. The work that writes it is on the frame's stream. */
VXM_API vxm_code vxm_engine_output(const vxm_engine* engine, int32_t i, vxm_output* output);

/* Waits for the last frame and says whether its results mean something: VXM_OK or VXM_FRAME_..., else why it cannot be
 * told. frame may be null. */
VXM_API vxm_code vxm_engine_status(vxm_engine* engine, vxm_frame* frame);

/* Rows of a level in the last frame; after vxm_engine_status. */
VXM_API vxm_code vxm_engine_rows(const vxm_engine* engine, int32_t level, int64_t* rows);

/* Copies rows 0 .. count - 1 (all of a tensor that has no level) of result i to memory of the host, contiguous; after
 * vxm_engine_status. coords and data may be null. */
VXM_API vxm_code vxm_engine_read(vxm_engine* engine, int32_t i, int32_t* coords, void* data);

VXM_API size_t vxm_dtype_size(vxm_dtype dtype); /* bytes */

#ifdef __cplusplus
}
#endif
#endif
