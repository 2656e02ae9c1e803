// The order of search results: Sphinx's own scores, with pages whose file name has a word of the query first, then
// guides before lists, and lists before records of measurements.
var Scorer = {
  score: (result) => {
    const [docname, title, anchor, description, score, filename, kind] = result;
    const asked = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().split(/\W+/);
    const named = docname.split("/").pop().split("-").some((word) => asked.includes(word));
    const part = { "tutorials": 3, "how-to": 4, "explanation": 2, "project": -4 }[docname.split("/")[0]] || 0;
    return score + part + (named ? 12 : 0) - (/\/index$/.test(docname) ? 1 : 0);
  },
  objNameMatch: 25,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
