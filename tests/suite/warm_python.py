"""Stands for an interpreter: asks the warm process beside it to fork one, and ends as that does."""

import json
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    arguments = sys.argv[1:]
    is_unbuffered = arguments[:1] == ["-u"]
    if is_unbuffered:
        arguments = arguments[1:]
        os.environ["PYTHONUNBUFFERED"] = "1"
    is_known = arguments[:1] == ["-m"] and arguments[1:2] and arguments[1].partition(".")[0] == "shardwise"
    is_script = bool(arguments) and arguments[0].endswith(".py")
    if not (is_known or is_script) or "SHARDWISE_TESTS_COLD" in os.environ:
        return run_real()

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{HERE}/socket")
    except OSError:
        return run_real()
    # Before the fork: a signal that comes now must reach the new process.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    descriptors = [0, 1, 2, *(int(word) for word in arguments if word.isdigit() and 2 < int(word) < 1024)]
    descriptors = [number for number in dict.fromkeys(descriptors) if is_open(number) and number != connection.fileno()]
    umask = os.umask(0o77)
    os.umask(umask)
    request = {
        "arguments": arguments,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "umask": umask,
        "descriptors": descriptors,
        "ignored": [int(number) for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
    }
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    for number in PASSED_ON:
        signal.signal(number, lambda received, frame: connection.send(str(received).encode()))
    for number in descriptors:
        os.close(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    answer = connection.recv(16)
    code = int(answer) if answer else 1
    if code < 0:  # ended by a signal, as this process does then
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def run_real() -> int:
    real = os.readlink(f"{HERE}/real")
    os.execv(real, [real, *sys.argv[1:]])


os._exit(main())
