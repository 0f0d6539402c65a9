#include "extension/virtual_device/driver/kernel_traffic.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("a kernel without a loop takes no more than its threads load and store", "[virtual_device]") {
  const auto kernels = read_kernel_traffic(R"(
.version 8.8
.target sm_86
.visible .entry add(
	.param .u64 .ptr .global .align 1 add_param_0,
	.param .u64 .ptr .global .align 1 add_param_1,
	.param .u32 add_param_2
)
.reqntid 128
{
	.reg .b64 	%rd<7>;
	ld.param.b64 	%rd1, [add_param_0];      // the input
	ld.param.b64 	%rd2, [add_param_1];
	ld.param.b32 	%r9, [add_param_2];
	mad.wide.s32 	%rd3, %r9, 4, %rd1;
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd3 + 0 ];
	@%p1 ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd3 + 16 ];
	add.s64 	%rd4, %rd2, %rd6;
	@%p1 st.global.b16 [ %rd4 + 0 ], { %rs1 };
	ret;
}
)");
  REQUIRE(kernels.contains("add"));
  const KernelTraffic& add = kernels.at("add");
  REQUIRE(add.arguments.size() == 3);
  CHECK(add.arguments[0].reads.bytes_of_thread == 32);
  CHECK(add.arguments[0].reads.loops == 0);
  CHECK(add.arguments[0].writes.bytes_of_thread == 0);
  CHECK(add.arguments[1].reads.bytes_of_thread == 0);
  CHECK(add.arguments[1].writes.bytes_of_thread == 2);
  CHECK(add.arguments[2].reads.bytes_of_thread == 0);
  CHECK(add.is_complete);
  CHECK_FALSE(add.computes_products);
}

TEST_CASE("each loop that loads an argument goes over all of it, but one whose loads are never done",
          "[virtual_device]") {
  const auto kernels = read_kernel_traffic(R"(
.visible .entry rows(.param .u64 .ptr .global .align 1 rows_param_0, .param .u64 .ptr .global .align 1 rows_param_1)
{
	ld.param.b64 	%rd1, [rows_param_0];
	ld.param.b64 	%rd2, [rows_param_1];
	mov.pred 	%p9, 0;
$L__BB0_1:
	add.s64 	%rd3, %rd1, 64;
	ld.global.b32 	%r1, [%rd3];
	ld.global.b32 	%r2, [%rd3+4];
	@%p1 bra 	$L__BB0_1;
$L__BB0_2:
	ld.global.b32 	%r3, [%rd1];
	st.global.b32 	[%rd1], %r3;
	@%p9 ld.global.b32 	%r4, [%rd2];
	@%p2 bra 	$L__BB0_2;
	@!%p3 bra 	$L__BB0_4;
	red.global.add.f32 	[%rd2], %r4;
$L__BB0_4:
	ret;
}
)");
  const KernelTraffic& rows = kernels.at("rows");
  CHECK(rows.arguments[0].reads.loops == 2);
  CHECK(rows.arguments[0].writes.loops == 1);
  CHECK(rows.arguments[0].reads.bytes_of_thread == 0);
  CHECK(rows.arguments[1].reads.loops == 0);
  CHECK(rows.arguments[1].reads.bytes_of_thread == 4);
  CHECK(rows.arguments[1].writes.bytes_of_thread == 4);
}

TEST_CASE("of loops in two branches a thread goes through one", "[virtual_device]") {
  const auto kernels = read_kernel_traffic(R"(
.entry loss(.param .u64 .ptr .global .align 1 loss_param_0)
{
	ld.param.b64 	%rd1, [loss_param_0];
	@%p1 bra 	$L__ignored;
$L__maximum:
	ld.global.b32 	%r1, [%rd1];
	@%p2 bra 	$L__maximum;
$L__gradient:
	ld.global.b32 	%r1, [%rd1];
	st.global.b32 	[%rd1], %r1;
	@%p2 bra 	$L__gradient;
	bra.uni 	$L__end;
$L__ignored:
	st.global.b32 	[%rd1], %r2;
	@%p2 bra 	$L__ignored;
$L__end:
	ret;
}
)");
  CHECK(kernels.at("loss").arguments[0].reads.loops == 2);
  CHECK(kernels.at("loss").arguments[0].writes.loops == 1);
}

TEST_CASE("an address that comes back from shared memory is of the argument that went there", "[virtual_device]") {
  const auto kernels = read_kernel_traffic(R"(
.entry scatter(.param .u64 .ptr .global .align 1 scatter_param_0)
{
	ld.param.b64 	%rd1, [scatter_param_0];
	mad.wide.s32 	%rd2, %r1, 4, %rd1;
	st.shared.v2.b64 	[%r2], {%rd2, %rd2};
	bar.sync 	0;
	ld.shared.v2.b64 	{%rd3, %rd4}, [%r3];
	red.global.gpu.relaxed.add.f32 [ %rd4 + 0 ], %r4;
	ret;
}
)");
  CHECK(kernels.at("scatter").arguments[0].writes.bytes_of_thread == 4);
}

TEST_CASE("what is loaded is no address, and a length is none either", "[virtual_device]") {
  const auto kernels = read_kernel_traffic(R"(
.entry gather(.param .u64 .ptr .global .align 1 gather_param_0, .param .u64 gather_param_1, .param .u64 .ptr .global .align 1 gather_param_2)
{
	ld.param.b64 %rd1, [gather_param_0];
	ld.param.b64 %rd2, [gather_param_1];
	ld.param.b64 %rd3, [gather_param_2];
	ld.global.b64 %rd4, [%rd1];
	mul.lo.s64 %rd5, %rd4, %rd2;
	add.s64 %rd6, %rd5, %rd3;
	ld.global.f16 %rs1, [%rd6];
	ret;
}
.entry other(.param .b8 other_param_0[16])
{
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %f1, %f2, %f3, %f4 }, { %r1, %r2, %r3, %r4 }, { %r5, %r6 }, { %f1, %f2, %f3, %f4 };
	ret;
}
)");
  const KernelTraffic& gather = kernels.at("gather");
  CHECK(gather.arguments[0].reads.bytes_of_thread == 8);
  CHECK(gather.arguments[1].reads.bytes_of_thread == 0);
  CHECK(gather.arguments[2].reads.bytes_of_thread == 2);
  CHECK(kernels.at("other").computes_products);
  CHECK(kernels.at("other").arguments.size() == 1);
}

TEST_CASE("text that is no PTX has no kernels", "[virtual_device]") {
  CHECK(read_kernel_traffic("").empty());
  CHECK(read_kernel_traffic("kernel without an entry").empty());
  CHECK(read_kernel_traffic(".entry").at("").arguments.empty());
  CHECK(read_kernel_traffic(".entry open(").at("open").arguments.empty());
}
