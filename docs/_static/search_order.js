// The order of search results: Sphinx's own scores, and guides before lists, and lists before records of measurements.
var Scorer = {
  score: (result) => {
    const [docname, title, anchor, description, score, filename, kind] = result;
    const first = { "tutorials": 3, "how-to": 4, "explanation": 2, "project": -4 };
    const part = docname.split("/")[0];
    return score + (first[part] || 0) - (/\/index$/.test(docname) ? 1 : 0);
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
