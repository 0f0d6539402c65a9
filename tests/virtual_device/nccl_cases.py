"""How communicators are split, by ranks of one process: cases of test_device.py."""

import ctypes
import os
import pathlib
import stat
import tempfile

from device_cases import Skip, case, expect, expect_equal, main
from stand_ins import RUNTIME

GPUS = "a100-80,a100-80,a100-80,a100-80"
NO_COLOR = -1


def communicators():
    """One for each of the machine's four GPUs."""
    nccl, handles = ctypes.CDLL("libnccl.so.2"), (ctypes.c_void_p * 4)()
    expect_equal(nccl.ncclCommInitAll(handles, 4, None), 0, "ncclCommInitAll")
    return nccl, [ctypes.c_void_p(handle) for handle in handles]


def split(nccl, whole, colors):
    """All ranks in one group, as one thread must: what each has got."""
    parts = [ctypes.c_void_p() for _ in whole]
    expect_equal(nccl.ncclGroupStart(), 0)
    for comm, part, color in zip(whole, parts, colors):
        expect_equal(nccl.ncclCommSplit(comm, color, 0, ctypes.byref(part), None), 0, "ncclCommSplit")
    expect_equal(nccl.ncclGroupEnd(), 0, "ncclGroupEnd")
    return parts


def ask(nccl, part):
    count, rank = ctypes.c_int(), ctypes.c_int()
    nccl.ncclCommCount(part, ctypes.byref(count))
    nccl.ncclCommUserRank(part, ctypes.byref(rank))
    return count.value, rank.value


def read_id(nccl, part):
    text = ctypes.create_string_buffer(128)
    expect_equal(nccl.ncclCommGetUniqueId(part, text), 0)
    return text.raw


def gather_into_four(nccl, part):
    """Each rank's 7 gathered into four floats that the host wrote: what they are afterwards."""
    runtime = ctypes.CDLL(RUNTIME)
    blocks = [ctypes.c_void_p(), ctypes.c_void_p()]
    for block, numbers in zip(blocks, ((7.0,), (1.0, 2.0, 3.0, 4.0))):
        runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(16))
        for i, number in enumerate(numbers):
            runtime.cudaMemcpy(ctypes.c_void_p(block.value + 4 * i), (ctypes.c_float * 1)(number), ctypes.c_size_t(4), 1)
    expect_equal(nccl.ncclAllGather(blocks[0], blocks[1], ctypes.c_size_t(1), 7, part, None), 0)
    back = (ctypes.c_float * 4)()
    runtime.cudaMemcpy(back, blocks[1], ctypes.c_size_t(16), 2)
    return list(back)


@case(gpu=GPUS)
def a_split_in_a_group_has_the_size_of_its_part():
    nccl, whole = communicators()
    parts = split(nccl, whole, [5, 6, 5, NO_COLOR])
    expect_equal([ask(nccl, part) for part in parts[:3]], [(2, 0), (1, 0), (2, 1)], "counts and ranks")
    expect_equal(parts[3].value, None, "the part of who chose none")
    device = ctypes.c_int()
    nccl.ncclCommCuDevice(parts[2], ctypes.byref(device))
    expect_equal(device.value, 2, "the device of the third rank's part")
    expect_equal(gather_into_four(nccl, parts[1]), [7.0, 2.0, 3.0, 4.0], "what a gathering of one wrote")


@case(gpu=GPUS, OOMDIAG_RANK_JOB="", OOMDIAG_TOPOLOGY="")
def variables_that_are_empty_are_as_if_they_were_not_set():
    nccl, whole = communicators()
    parts = split(nccl, whole, [5, 6, 5, NO_COLOR])
    expect_equal([ask(nccl, part) for part in parts[:3]], [(2, 0), (1, 0), (2, 1)], "counts and ranks")


@case(gpu=GPUS)
def who_is_not_there_is_an_invalid_argument():
    nccl, whole = communicators()
    INVALID, number, block, size = 4, ctypes.c_int(), ctypes.create_string_buffer(64), ctypes.c_size_t(1)
    none = [nccl.ncclCommCount(None, ctypes.byref(number)), nccl.ncclAllReduce(block, block, size, 7, 0, None, None), nccl.ncclSend(block, size, 7, 1, None, None),
            nccl.ncclCommSplit(None, 0, 0, ctypes.byref(ctypes.c_void_p()), None)]
    expect_equal(none, [INVALID] * 4, "without a communicator")
    for rank in (-1, 4):
        answers = [nccl.ncclSend(block, size, 7, rank, whole[0], None), nccl.ncclRecv(block, size, 7, rank, whole[0], None),
                   nccl.ncclBroadcast(block, block, size, 7, rank, whole[0], None)]
        expect_equal(answers, [INVALID] * 3, f"rank {rank} of 4")
    expect_equal((nccl.pncclCommUserRank(whole[2], ctypes.byref(number)), number.value), (0, 2), "the name for profilers")


@case(gpu=GPUS)
def parts_never_share_a_mailbox():
    nccl, whole = communicators()
    if not hasattr(nccl, "ncclCommGetUniqueId"):
        raise Skip("an NCCL before 2.30 does not give a communicator's id")
    all_in_one = split(nccl, whole, [0] * 4)
    grandchildren = split(nccl, all_in_one, [0] * 4)
    again = split(nccl, whole, [1] * 4)
    by_color = split(nccl, whole, [1, 1 + (1 << 8), 1 + (1 << 16), 1 + (1 << 30)])
    ids = [read_id(nccl, part) for part in (whole[0], all_in_one[0], grandchildren[0], again[0], *by_color)]
    expect_equal(len(set(ids)), 8, "ids")
    expect_equal(len({text[:16] for text in ids}), 8, "names of their files")
    expect_equal(len({read_id(nccl, part) for part in again}), 1, "ids of one part")


def mailboxes():
    """The files of this process's communicators, which other cases may have made."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return {pathlib.Path(line.split(maxsplit=5)[5]) for line in lines if line.endswith("-mail")}


def communicators_and_mailbox():
    before = mailboxes()
    nccl, whole = communicators()
    mailbox, = mailboxes() - before
    return nccl, whole, mailbox


@case(gpu=GPUS)
def ranks_share_files_in_a_folder_of_their_own_and_leave_none():
    nccl, whole, mailbox = communicators_and_mailbox()
    folder = mailbox.parent.stat()
    expect_equal((folder.st_uid, stat.S_IMODE(folder.st_mode)), (os.geteuid(), 0o700), "whose folder it is")
    opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    expect(str(mailbox) not in opened, "a descriptor of the mailbox is open")
    split(nccl, whole, [0, 0, 1, 1])
    for comm in whole:
        expect_equal(nccl.ncclCommDestroy(comm), 0, "ncclCommDestroy")
    expect(not mailbox.exists(), "the mailbox is left")


@case(gpu=GPUS)
def a_link_in_the_place_of_a_file_of_ranks_is_not_followed():
    nccl, whole, mailbox = communicators_and_mailbox()
    with tempfile.NamedTemporaryFile() as victim:
        victim.write(b"precious")
        victim.flush()
        planted = mailbox.with_name(mailbox.name.replace("-mail", "-1"))
        planted.symlink_to(victim.name)
        split(nccl, whole, [0] * 4)
        expect_equal(pathlib.Path(victim.name).read_bytes(), b"precious", "what the link led to")
        planted.unlink()


@case(gpu=GPUS)
def ranks_share_nothing_in_a_folder_that_others_may_write_into():
    nccl, comm = ctypes.CDLL("libnccl.so.2"), ctypes.c_void_p()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        text = (b"0123456789abcdef" + folder.encode()).ljust(128, b"\0")
        identifier = type("UniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_char * 128)]})()
        ctypes.memmove(ctypes.byref(identifier), text, 128)
        expect_equal(nccl.ncclCommInitRank(ctypes.byref(comm), 2, identifier, 0), 0, "ncclCommInitRank")
        expect_equal(os.listdir(folder), [], "what lies in the folder")
        expect_equal(nccl.ncclCommDestroy(comm), 0, "ncclCommDestroy")


@case(gpu=GPUS, group="slow")
def who_is_not_answered_does_not_know_what_others_gather():
    nccl, whole = communicators()
    part = ctypes.c_void_p()
    expect_equal(nccl.ncclCommSplit(whole[0], 0, 0, ctypes.byref(part), None), 0, "a split that no other rank makes")
    expect(gather_into_four(nccl, part)[1:] == [2.0, 3.0, 4.0], "what lies behind was written")


if __name__ == "__main__":
    main()
