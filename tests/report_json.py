"""Reports in JSON, as tests look at them."""
import json


def with_main_device(report):
    """The report with the fields of its main device at its top level as well: most programs have one device."""
    return (report["devices"][report["main_device"]] if report["devices"] else {}) | report


def load_report(text):
    return with_main_device(json.loads(text))
