// A program as the file has it, checked and laid out for its capacities.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.h"

namespace vxm {

struct Input {
  vxm_input_info info;
  int level;                        // -1: a tensor
  Array where, data, count, batch;  // where: coordinates or points
};

struct Output {
  vxm_output_info info;
  Array data, coords;
  Place rows;
};

struct Report {
  std::string kind;
  int number;
  int64_t slot;  // of the status block
};

struct Limits {
  bool there = false;
  int64_t passes = 0, units = 0;
};

struct Step {
  Work work;
  int64_t scratch = -1;  // offset
};

struct Program {
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<Report> reports;
  std::vector<int64_t> capacities;
  std::vector<Bounds> bounds;  // of levels
  std::vector<bool> given;     // whether a level is an input
  std::vector<double> rooms;
  std::vector<Limits> limits;  // of maps
  std::vector<Step> steps;
  size_t side[2] = {0, 0};  // of `steps` those that may run beside the others: from the first, before the second
  size_t join = 0;          // the first step that reads of them
  int64_t work_bytes = 0;
  int64_t status = 0, slots = 0;  // offset, and how many of 4 integers

  Program(const File& file, Backend& backend);

  void run(const Frame& frame, Backend& backend) const {
    Frame beside = frame;
    for (size_t i = 0; i <= steps.size(); ++i) {
      if (side[0] < side[1] && i == side[0]) beside.stream = backend.fork(frame.stream);
      if (side[0] < side[1] && i == join) backend.join(frame.stream);
      if (i == steps.size()) break;
      const Step& step = steps[i];
      step.work.run(i >= side[0] && i < side[1] ? beside : frame,
                    step.scratch < 0 ? nullptr : frame.work + step.scratch);
    }
  }
};

}  // namespace vxm
