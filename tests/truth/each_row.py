"""What peft_rows.py and timm_rows.py share: each row in a child of its own, which prints a line of JSON."""
import json
import os
import signal
import sys
import traceback


def run_each(rows, measure, longest):
    """`measure` gives what is to be printed of a row, beside its name and the child's process id; a child that takes more than `longest`
    seconds is ended."""
    for row in rows:
        child = os.fork()
        if child == 0:
            signal.alarm(longest)
            try:
                answer = measure(row)
            except Exception as error:  # one row that cannot be run does not end the others
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps({"row": row["row"], "pid": os.getpid(), **answer}), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(json.dumps({"row": row["row"], "error": f"ended by signal {os.WTERMSIG(status)}"}), flush=True)


def read_rows():
    """The list in the file that the program is given."""
    with open(sys.argv[1]) as stream:
        return json.load(stream)
