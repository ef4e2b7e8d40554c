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

  int64_t work_bytes = 0;
  int64_t status = 0, slots = 0;  // offset, and how many of 4 integers

  Program(const File& file, Backend& backend);

  void run(const Frame& frame) const {
    for (const Step& step : steps) step.work.run(frame, step.scratch < 0 ? nullptr : frame.work + step.scratch);
  }
};

}  // namespace vxm
