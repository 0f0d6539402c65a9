#include "profiler/explain/reasons/reason_evidence.h"
#include "profiler/explain/reasons/reason_rules.h"
#include "tests/catch.h"
#include "tests/profiler/explain/reasons/at_oom.h"

// What several rows of kReasons look at (reason_evidence.h), with values.

namespace oomdiag {

TEST_CASE("lists that hooks of layers fill are emptied, and kept caches of generations are dropped as a whole",
          "[explain][reasons]") {
  CHECK(lines_for_kept("attribute 'log[*].meta[\"out\"][\"past_key_values\"].layers[*].keys' in main (a.py:3)", false)
            .front()
            .starts_with("for _each in log: _each.meta[\"out\"][\"past_key_values\"] = None"));
}

TEST_CASE("lines to write have a module's attributes as the program does", "[explain][reasons]") {
  CHECK(as_written("self._modules[\"ssim\"].preds") == "self.ssim.preds");
  CHECK(as_written("net._modules[3]._modules[*].seen") == "net[3][*].seen");
  CHECK(as_written("history") == "history");
  CHECK(line_for_kept("list 'self._modules[\"ssim\"].preds' in f (a.py:3)", false) ==
        "self.ssim.preds.append(x.detach().cpu())  # of a scalar: x.item(); where it is read again: .to(device)");
}

TEST_CASE("the line to write names optimizers that a list keeps, and modules that a model has one more of each time",
          "[explain][reasons]") {
  const auto line = [](std::string_view variable) { return line_for_kept(variable, false); };
  CHECK(
      line("defaultdict 'trainer._optimizers[*].state' in main (run.py:3)").starts_with("trainer._optimizers.clear()"));
  CHECK(line("dict 'model._modules[*]._modules[\"lora\"]._modules[\"run-0\"]._parameters' in main (run.py:3)")
            .starts_with("for _each in model: del _each.lora[\"run-0\"]"));
  CHECK(line("dict 'nets[0]._modules[\"head\"]._parameters' in main (run.py:3)").starts_with("nets.clear()"));
}

TEST_CASE("a line of code for one of many items is a loop over them", "[explain][reasons]") {
  const auto free = [](const std::string& item) { return item + " = None"; };
  CHECK(for_each_item("self.cache", free) == "self.cache = None");
  CHECK(for_each_item("results[*].scores", free) == "for _each in results: _each.scores = None");
  CHECK(for_each_item("nets[*].layers[*].weight", free) ==
        "for _each in (x for a in nets for x in a.layers): _each.weight = None");
  CHECK(for_each_item("styles[*][*][*]", free) ==
        "for _each in (x for a in styles for b in a for x in b): _each = None");
  CHECK(line_for_kept("attribute 'hypotheses[*].scores' in main (a.py:3)", false) ==
        "for _each in hypotheses: _each.scores = _each.scores.detach().cpu()");
  CHECK(assign_each("seen[*]", [](const std::string& item) { return item + ".cpu()"; }) ==
        "seen[:] = [x.cpu() for x in seen]");
  CHECK(line_for_kept("list 'batches[*].losses' in main (a.py:3)", false)
            .ends_with("or del batches[:-1], where these objects have served"));
}

TEST_CASE("what a container or a generator keeps has a line of its own", "[explain][reasons]") {
  CHECK(line_for_kept("OrderedDict 'self.masks' in main (a.py:3)", false)
            .starts_with("len(self.masks) > 16 and self.masks.popitem(last=False)"));
  CHECK(line_for_kept("generator 'futures[*]._result' in main (a.py:3)", false)
            .starts_with("del x  # before each yield"));
}

TEST_CASE("lines for what is kept are those of its holder: a hook, a metric, a cache of training",
          "[explain][reasons]") {
  CHECK(line_for_kept("attribute 'model.layer4._forward_hooks[*][*].out' in f (a.py:1)", false)
            .starts_with("handle = module.register_forward_hook(hook)"));
  CHECK(line_for_kept("OrderedDict of functions 'point._backward_hooks' in f (a.py:1)", false)
            .starts_with("handle = module.register_full_backward_hook(hook)  # and handle.remove()"));
  CHECK(line_for_kept("dict of functions 'canvas.callbacks' in f (a.py:1)", false)
            .starts_with("canvas.callbacks.clear()"));
  CHECK(line_for_kept("attribute 'loader[*].grad' in f (a.py:1)", false)
            .starts_with("for _each in loader: _each.grad = None  # "));
  CHECK(lines_for_kept("list 'metric.preds' in fit (a.py:1)", false) ==
        std::vector<std::string>{
            "metric.preds.append(x.detach().cpu())  # of a scalar: x.item(); where it is read again: .to(device)",
            "metric.preds.clear()  # once they have been read: an object that collects, as a metric: metric.reset()"});
  CHECK(lines_for_kept("list 'history' in train.py", false).size() == 1);
}

TEST_CASE("where memory grows by a key each time the line removes keys, and an optimizer's state its parameters",
          "[explain][reasons]") {
  const auto line = [](std::string_view referrer) { return lines_for_kept(referrer, false).front(); };
  CHECK(line("attribute 'sessions[\"*\"].layers[*].keys' in serve.py").starts_with("sessions.pop(key)  # "));
  CHECK(line("defaultdict 'scene.optimizer.state' in splat.py").starts_with("del scene.optimizer.state[old]  # "));
}

}  // namespace oomdiag
