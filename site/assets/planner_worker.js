// Python in a worker, so that the page stays responsive while it loads.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = (async () => {
  const [python, archive] = await Promise.all([
    loadPyodide(),
    fetch("memlab.zip").then((response) => response.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip");
  python.runPython("import sys; sys.path.insert(0, 'site')");
  return python.pyimport("planner");
})();

ready.then(
  (planner) => postMessage({ choices: JSON.parse(planner.choices()) }),
  (error) => postMessage({ failed: String(error) }),
);
onmessage = async ({ data }) => {
  const planner = await ready;
  postMessage({ settings: data, answer: JSON.parse(planner.answer(data)) });
};
