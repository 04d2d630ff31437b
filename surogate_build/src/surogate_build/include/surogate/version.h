// Version of what compiled modules and Python agree on: codes of dtypes (dtype.h), tables of addresses (param_table.cuh,
// table16.cuh), the layout of workspaces. Raise it, and HEADERS of surogate_core.api.compiled, if one of them changes so that
// a module has to be compiled again. Core refuses modules of another version.
#pragma once

#define SUROGATE_HEADERS 1
