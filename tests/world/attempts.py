"""What a script may try to change: each attempt has a folder of its own with throw-away files.

`new(name)` is the path of a file that does not exist, `kept(name)` of one that does; see `prepare`
in test_confinement.py.
"""

import asyncio
import bz2
import ctypes
import dbm
import gzip
import io
import logging
import lzma
import mmap
import multiprocessing
import os
import pathlib
import posix
import shutil
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import zipfile

import numpy as np
import torch

FOLDER, (VICTIM, *PORTS) = sys.argv[1], map(int, sys.argv[2:])
ATTEMPTS = {}


def attempt(function):
    ATTEMPTS[function.__name__] = function
    return function


def path(name):
    return os.path.join(FOLDER, attempt.name, name)


def define(**functions):
    for name, function in functions.items():
        function.__name__ = name
        attempt(function)


def write(target, text="over", mode="w"):
    with open(target, mode) as file:
        file.write(text)


def overwritten(file):
    with file:
        file.write(b"over")


new, kept = (lambda: path("new")), (lambda: path("kept"))
inner, folder = (lambda: path("full/inner")), (lambda: path("full"))


def opened(flags, target=None):
    return os.open(target or kept(), flags)


define(
    open_new=lambda: write(new()),
    open_kept=lambda: write(kept()),
    open_append=lambda: write(kept(), "more", "a"),
    pathlib_write=lambda: pathlib.Path(kept()).write_text("over"),
    file_io=lambda: overwritten(io.FileIO(kept(), "w")),
    io_open=lambda: overwritten(sys.modules["_io"].open(kept(), "wb")),
    posix_open=lambda: os.write(posix.open(kept(), os.O_WRONLY | os.O_TRUNC), b"over"),
    creat=lambda: ctypes.CDLL(None).creat(kept().encode(), 0o600),
    tar=lambda: tarfile.open(kept(), "w").close(),
    tar_gz=lambda: tarfile.open(kept(), "w:gz").close(),
    bz2=lambda: overwritten(bz2.open(kept(), "wb")),  # noqa: SIM115
    lzma=lambda: overwritten(lzma.open(kept(), "wb")),  # noqa: SIM115
    gzip=lambda: overwritten(gzip.open(kept(), "wb")),  # noqa: SIM115
    zip=lambda: zipfile.ZipFile(kept(), "w").close(),
    dbm=lambda: dbm.open(new(), "c").close(),
    logging=lambda: logging.FileHandler(kept()).emit(logging.makeLogRecord({"msg": "x"})),
    numpy_save=lambda: np.save(new(), np.zeros(3)),
    numpy_tofile=lambda: np.zeros(3).tofile(kept()),
    numpy_memmap=lambda: np.memmap(kept(), dtype=np.uint8, mode="r+").fill(88),
    mmap=lambda: mmap.mmap(opened(os.O_RDWR), 0).__setitem__(0, 88),
    torch_save=lambda: torch.save({"a": 1}, kept()),
    torch_from_file=lambda: torch.from_file(kept(), shared=True, size=3, dtype=torch.uint8).fill_(
        88
    ),
    torch_storage=lambda: torch.UntypedStorage.from_file(kept(), shared=True, nbytes=3).fill_(88),
    torch_script=lambda: torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), kept()),
    remove=lambda: os.remove(kept()),
    posix_unlink=lambda: posix.unlink(kept()),
    unlink_beneath=lambda: os.unlink("kept", dir_fd=opened(os.O_RDONLY, path(""))),
    pathlib_unlink=lambda: pathlib.Path(kept()).unlink(),
    posix_rmdir=lambda: posix.rmdir(path("empty")),
    rmtree=lambda: shutil.rmtree(folder()),
    rmtree_quietly=lambda: shutil.rmtree(pathlib.Path(folder()), ignore_errors=True),
    scandir_remove=lambda: [os.remove(entry.path) for entry in os.scandir(folder())],
    move=lambda: shutil.move(kept(), new()),
    rename=lambda: os.rename(kept(), new()),
    rename_over=lambda: os.rename(inner(), kept()),
    posix_rename=lambda: posix.rename(kept(), new()),
    pathlib_rename=lambda: pathlib.Path(kept()).rename(new()),
    rename_folder=lambda: os.rename(folder(), new()),
    truncate=lambda: os.truncate(kept(), 0),
    posix_truncate=lambda: posix.truncate(kept(), 0),
    ftruncate=lambda: os.ftruncate(opened(os.O_RDWR), 0),
    chmod=lambda: os.chmod(kept(), 0),
    posix_chmod=lambda: posix.chmod(kept(), 0),
    fchmod=lambda: os.fchmod(opened(os.O_RDONLY), 0),
    pathlib_chmod=lambda: pathlib.Path(kept()).chmod(0),
    chown=lambda: os.chown(kept(), 1234, 1234),
    posix_chown=lambda: posix.chown(kept(), 1234, 1234),
    fchown=lambda: os.fchown(opened(os.O_RDONLY), 1234, 1234),
    utime=lambda: os.utime(kept(), (1, 1)),
    posix_utime=lambda: posix.utime(kept(), (1, 1)),
    utime_of_open=lambda: os.utime(opened(os.O_RDONLY), (1, 1)),
    setxattr=lambda: os.setxattr(kept(), "user.a", b"x"),
    posix_setxattr=lambda: posix.setxattr(kept(), "user.a", b"x"),
    mkfifo=lambda: os.mkfifo(new()),
    posix_mkfifo=lambda: posix.mkfifo(new()),
    mknod=lambda: os.mknod(new()),
    mkdir=lambda: os.mkdir(new()),
    posix_mkdir=lambda: posix.mkdir(new()),
    makedirs=lambda: os.makedirs(path("new/a/b")),
    mkdir_beneath=lambda: os.mkdir("new", dir_fd=opened(os.O_RDONLY, path(""))),
    open_beneath=lambda: os.open(
        "new", os.O_CREAT | os.O_WRONLY, dir_fd=opened(os.O_RDONLY, path(""))
    ),
    symlink=lambda: (os.symlink(kept(), new()), write(new())),
    symlink_in_c=lambda: (os.symlink(kept(), new()), overwritten(io.FileIO(new(), "w"))),
    linked_unlink=lambda: (os.symlink(folder(), new()), posix.unlink(path("new/inner"))),
    linked_mkdir=lambda: (os.symlink(folder(), new()), posix.mkdir(path("new/made"))),
    linked_rename=lambda: (os.symlink(folder(), new()), posix.rename(inner(), path("new/moved"))),
    linked_open=lambda: (os.symlink(folder(), new()), opened(os.O_CREAT, path("new/made"))),
    existing_link=lambda: write(path("link")),
    posix_symlink=lambda: posix.symlink(kept(), new()),
    hard_link=lambda: (os.link(kept(), new()), write(new())),
    posix_hard_link=lambda: posix.link(kept(), new()),
    unix_socket=lambda: socket.socket(socket.AF_UNIX).bind(new()),
    temporary_file=lambda: tempfile.NamedTemporaryFile(dir=path(""), delete=False),  # noqa: SIM115
    temporary_folder=lambda: tempfile.mkdtemp(dir=path("")),
    thread=lambda: in_thread(write, kept()),
    sqlite=lambda: sqlite3.connect(new()).execute("create table a (b)"),
    sqlite_uri=lambda: sqlite3.connect(f"file:{new()}", uri=True).execute("create table a (b)"),
    process=lambda: subprocess.run(["touch", new()]),
    shell=lambda: subprocess.run(f"touch {new()}", shell=True),
    os_system=lambda: os.system(f"touch {new()}"),
    c_system=lambda: ctypes.CDLL(None).system(f"touch {new()}".encode()),
    popen=lambda: os.popen(f"touch {new()}").read(),
    asyncio=lambda: asyncio.run(asyncio.create_subprocess_exec("touch", new())),
    spawn=lambda: os.posix_spawn("/usr/bin/touch", ["touch", new()], {}),
    posix_spawn=lambda: os.waitpid(
        posix.posix_spawn("/usr/bin/touch", ["touch", new()], os.environ), 0
    ),
    other_executable=lambda: subprocess.run(["git", "status", new()], executable="/usr/bin/touch"),
    git_branch=lambda: git("branch", "-D", "other"),
    git_new_branch=lambda: git("branch", "new"),
    git_output=lambda: git("log", f"--output={kept()}"),
    pool=lambda: in_pool(write, kept()),
    kill=lambda: os.kill(VICTIM, 15),
    tcp=lambda: socket.create_connection(("127.0.0.1", PORTS[0]), 1),
    tcp_in_c=lambda: sys.modules["_socket"].socket().connect(("127.0.0.1", PORTS[1])),
    udp=lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORTS[2])),
    udp_message=lambda: socket.socket(type=socket.SOCK_DGRAM).sendmsg(
        [b"x"], (), 0, ("127.0.0.1", PORTS[3])
    ),
)


@attempt
def sqlite_attach():
    database = sqlite3.connect(":memory:")
    database.execute("attach ? as other", (new(),))
    database.execute("create table other.a (b)")


@attempt
def profiler():
    with torch.profiler.profile() as profile:
        torch.zeros(2) + 1
    profile.export_chrome_trace(kept() + ".json")


def git(*words):
    return subprocess.run(["git", *words], cwd=path("repository"), capture_output=True)


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def in_pool(function, *args):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(function, args)


if __name__ == "__main__":
    for attempt.name, function in ATTEMPTS.items():
        try:
            function()
        except BaseException as error:
            print(f"{attempt.name}: {type(error).__name__}: {error}")
        else:
            print(f"{attempt.name}: done")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.zeros(1, 2)).sum().backward()
        optimizer.step()
