"""Kernels of notebooks that begin with their libraries loaded: forks of a Python that did it once.

    python notebook_kernels.py SOCKET    serves at SOCKET, a Unix socket, until its input ends

To load IPython, NumPy, matplotlib and numba takes two to three seconds of each notebook, and none
of it depends on the notebook. Of nanoeuler nothing is loaded: that comes from the notebook's own
PYTHONPATH, as the rest of its environment does. `nanoeuler.book run` starts kernels of the usual
kind, so no notebook is made that would need these.

Nor is a PNG painted here, since nbval compares none: a figure is laid out, with all that its
artists compute, and nothing is drawn of it. SVG is drawn, and compared.
"""

import atexit
import base64
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import socketserver
import sys

LOOK = 0.05  # seconds between two looks whether a kernel still runs
PICTURE = base64.b64encode(b"laid out, not painted").decode()  # in place of a PNG's bytes


class Kernel:
    """Asks the server at a socket for a kernel; has what jupyter_client needs of a Popen."""

    stdout = stderr = returncode = None

    def __init__(self, place, command, *, cwd=None, env=None, **others):
        self.stdin = io.BytesIO()
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(place)
        self.answers = self.line.makefile()
        order = {"argv": command[2:], "cwd": cwd or os.getcwd(), "env": env or dict(os.environ)}
        self.line.sendall((json.dumps(order) + "\n").encode())
        self.pid = int(self.answers.readline())

    def poll(self):
        """The kernel's exit code, None while it runs."""
        if self.returncode is None and select.select([self.line], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self):
        """The same as soon as there is one; 1 if the server has gone."""
        if self.returncode is None:
            self.returncode = int(self.answers.readline() or 1)
        return self.returncode

    def send_signal(self, number):
        """Send a signal to the kernel and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def terminate(self):
        """Ask the kernel to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self):
        """End the kernel."""
        self.send_signal(signal.SIGKILL)


class Handler(socketserver.StreamRequestHandler):
    """Starts the kernel that a line of JSON asks for; answers its process id, then its exit code.

    The kernel ends with whoever asked for it.
    """

    def handle(self):
        """In a process of its own, which is the kernel's parent."""
        order = json.loads(self.rfile.readline())
        kernel = os.fork()
        if not kernel:
            become(order, self)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it may have done so itself
            os.setpgid(kernel, kernel)
        self.wfile.write(f"{kernel}\n".encode())
        done, status = 0, 0
        while not done:
            if select.select([self.connection], [], [], LOOK)[0]:
                os.killpg(kernel, signal.SIGKILL)
            done, status = os.waitpid(kernel, os.WNOHANG)
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(f"{os.waitstatus_to_exitcode(status)}\n".encode())


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Each request in a fork of this process, which ends with its input."""

    paths: list[str]  # where a kernel looks for modules after its PYTHONPATH

    def service_actions(self):
        """Called twice a second."""
        super().service_actions()
        if select.select([sys.stdin], [], [], 0)[0]:
            os._exit(0)


def become(order, handler):
    """Make this process the kernel that `order` describes; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        handler.server.socket.close()
        handler.connection.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"] | {"JPY_PARENT_PID": str(os.getppid())})
        sys.argv = order["argv"]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*filter(None, paths), *handler.server.paths]
        from ipykernel import kernelapp

        kernelapp.launch_new_instance()
        code = 0
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def laid_out(paint, figure, fmt="png", **how):
    """In place of `paint`, IPython's `print_figure`: all that its artists compute, and no picture.

    A figure that can't be drawn raises here, too.
    """
    if fmt != "png":
        return paint(figure, fmt, **how)
    if figure.axes or figure.lines:
        figure.draw_without_rendering()
        return PICTURE


def load():
    """Load what notebooks use, down to what loads itself at the first figure and function."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # Not matplotlib_inline.backend_inline: in a kernel that imports it, cells show their figures.
    for name in ("ipykernel.zmqshell", "matplotlib.pyplot"):
        importlib.import_module(name)
    import numba
    from IPython.core import pylabtools
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.subplots().plot([1, 2], [1, 2], label="a")
    figure.legend()
    FigureCanvasAgg(figure).print_png(io.BytesIO())
    numba.njit(lambda x: x + 1)(1)
    pylabtools.print_figure = functools.partial(laid_out, pylabtools.print_figure)


def main():
    """Serve, and say when, by an empty line; whoever started this holds its input open."""
    load()
    gc.collect()
    gc.freeze()  # no kernel looks through all that for garbage
    with Server(sys.argv[1], Handler) as server:
        folder = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
        server.paths = [path for path in sys.path[1:] if path not in folder]
        print(flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
