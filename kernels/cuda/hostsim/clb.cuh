// The CPU's twin of device/clb.cuh: runs the text of a kernel on the CPU, for tests. One block at a time; every thread
// of it is a fiber, and fibers switch only at barriers and warp operations.
#pragma once
#include "sim_types.cuh"
#include "sim_machine.cuh"
#include "sim_record.cuh"
#include "sim_schedule.cuh"
#include "sim_warp.cuh"
#include "sim_math.cuh"
#include "sim_export.cuh"
