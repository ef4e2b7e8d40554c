/* The header is C99; what fails without an engine is a code and a sentence. capi ENGINE */
#include <stdio.h>
#include <string.h>

#include "voxmma/voxmma.h"

#define EXPECT(condition)                                                            \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, vxm_last_error()); \
      return 1;                                                                      \
    }                                                                                \
  } while (0)

int main(int argc, char** argv) {
  vxm_options options;
  vxm_engine* engine = (vxm_engine*)&options;
  vxm_engine_info info;
  vxm_input_info of;
  vxm_input input = {NULL, NULL, 0, NULL, NULL};
  vxm_frame frame;
  int64_t rows = -1;
  if (argc != 2) return 2;
  EXPECT(vxm_version() / 1000 == VXM_VERSION_MAJOR);
  EXPECT(vxm_dtype_size(VXM_FLOAT16) == 2 && vxm_dtype_size(VXM_INT64) == 8);
  EXPECT(vxm_engine_load("/nowhere/at/all", NULL, &engine) == VXM_ERROR_IO && engine == NULL);
  EXPECT(strstr(vxm_last_error(), "/nowhere/at/all") != NULL);
  EXPECT(vxm_engine_load(NULL, NULL, &engine) == VXM_ERROR_ARGUMENT);
  EXPECT(vxm_engine_load(argv[1], NULL, NULL) == VXM_ERROR_ARGUMENT);
  vxm_options_init(&options);
  options.size = 3;
  EXPECT(vxm_engine_load(argv[1], &options, &engine) == VXM_ERROR_ARGUMENT && engine == NULL);
  vxm_options_init(&options);
  EXPECT(vxm_engine_load(argv[1], &options, &engine) == VXM_OK && engine != NULL);
  EXPECT(vxm_engine_get_info(engine, &info) == VXM_OK && info.inputs == 1 && info.outputs > 0 && info.memory > 0);
  EXPECT(vxm_engine_input(engine, 0, &of) == VXM_OK && of.kind == VXM_VOXELS && of.shape[0] > 0);
  EXPECT(vxm_engine_input(engine, 1, &of) == VXM_ERROR_ARGUMENT);
  EXPECT(vxm_engine_status(engine, &frame) == VXM_ERROR_ARGUMENT);
  EXPECT(vxm_engine_run(engine, &input, 1, NULL) == VXM_OK);
  EXPECT(vxm_engine_rows(engine, 0, &rows) == VXM_ERROR_ARGUMENT);
  EXPECT(vxm_engine_status(engine, &frame) == VXM_OK && frame.code == VXM_OK);
  EXPECT(vxm_engine_rows(engine, 0, &rows) == VXM_OK && rows == 0);
  EXPECT(vxm_engine_rows(engine, info.levels, &rows) == VXM_ERROR_ARGUMENT);
  input.rows = of.shape[0] + 1;
  EXPECT(vxm_engine_run(engine, &input, 1, NULL) == VXM_ERROR_ARGUMENT);
  input.rows = 1;
  EXPECT(vxm_engine_run(engine, &input, 1, NULL) == VXM_ERROR_ARGUMENT);
  EXPECT(strcmp(vxm_last_error(), "coordinates or points of an input is null") == 0);
  EXPECT(strcmp(vxm_code_name(VXM_FRAME_DENSE), "VXM_FRAME_DENSE") == 0);
  vxm_engine_free(engine);
  vxm_engine_free(NULL);
  return 0;
}
