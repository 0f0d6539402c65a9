#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

// The newest form of a function has in CUDA 13 the plain name and in CUDA 12 a number behind it. The sources here define and
// call the newest forms by their plain names, for both; the older ones of CUDA 12 are in older_forms.cpp.

#if CUDART_VERSION < 13000
#undef cuGraphAddNode
#undef cuGraphNodeGetDependencies
#undef cuStreamGetCaptureInfo
#undef cuStreamUpdateCaptureDependencies
#define cuGraphAddNode cuGraphAddNode_v2
#define cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2
#define cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v3
#define cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_v2

#undef cudaStreamGetCaptureInfo
#define cudaGraphAddNode cudaGraphAddNode_v2
#define cudaGraphNodeGetDependencies cudaGraphNodeGetDependencies_v2
#define cudaMemAdvise cudaMemAdvise_v2
#define cudaMemPrefetchAsync cudaMemPrefetchAsync_v2
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v3
#define cudaStreamUpdateCaptureDependencies cudaStreamUpdateCaptureDependencies_v2
#endif
