// Python in a worker, so that the page stays responsive while it loads.
import { loadPyodide } from "./pyodide/pyodide.mjs";

// Reports how many bytes of all files have come.
let loaded = 0;
const plainly = self.fetch.bind(self);
self.fetch = async (...asked) => {
  const response = await plainly(...asked);
  if (!response.ok) postMessage({ failed: `${response.url} answered ${response.status}` });
  if (!response.body) return response;
  const counted = new TransformStream({
    transform(chunk, controller) {
      postMessage({ loaded: (loaded += chunk.byteLength) });
      controller.enqueue(chunk);
    },
  });
  const { headers, status, statusText } = response;
  return new Response(response.body.pipeThrough(counted), { headers, status, statusText });
};

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
  try {
    postMessage({ settings: data, answer: JSON.parse(planner.answer(data)) });
  } catch (error) {
    postMessage({ failed: String(error) });
  }
};
